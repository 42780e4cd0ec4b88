"""Notebooks without Jupyter: `make reference` executes docs/notebooks and stores the outputs, conf.py shows both.

The value of a cell's last line is its output; what a cell prints is not kept.
"""

from __future__ import annotations

import ast
import base64
import json
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
FORMS = {"image/svg+xml": "_repr_svg_", "text/markdown": "_repr_markdown_", "text/plain": "__repr__"}
"""Form of an output, the one to show first -> the method of a value that makes it."""
FRONT_MATTER = '---\nmyst:\n  enable_extensions: ["dollarmath"]\n---'


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs of its cells, run in order in one namespace. Raises what a cell raises."""
    names: dict[str, Any] = {}
    cells = [dict(cell) for cell in notebook["cells"]]
    for count, cell in enumerate((cell for cell in cells if cell["cell_type"] == "code"), start=1):
        value = _value("".join(cell["source"]), names)
        cell |= {"execution_count": count, "outputs": [] if value is None else [_output(value, count)]}
    return notebook | {"cells": cells}


def _value(source: str, names: dict[str, Any]) -> Any:
    """Of the last line, where it is an expression."""
    body = ast.parse(source).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if isinstance(last, ast.Expr) else None


def _output(value: object, count: int) -> dict[str, Any]:
    data = {
        form: getattr(value, method)().splitlines(keepends=True)
        for form, method in FORMS.items()
        if hasattr(value, method)
    }
    return {"output_type": "execute_result", "execution_count": count, "metadata": {}, "data": data}


def markdown(text: str) -> str:
    """The file of a notebook as a page of MyST: its cells and stored outputs."""
    parts = [FRONT_MATTER]
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [_shown(output["data"]) for output in cell.get("outputs", ())]
    return "\n\n".join(parts) + "\n"


def _shown(data: dict[str, list[str]]) -> str:
    """The first of `FORMS` that an output has; a picture with the first line of its text in place of it."""
    form = next(form for form in FORMS if form in data)
    content = "".join(data[form])
    if form == "image/svg+xml":
        address = f"data:{form};base64,{base64.b64encode(content.encode()).decode()}"
        return f"```{{image}} {address}\n:alt: {data['text/plain'][0].strip()}\n```"
    return content if form == "text/markdown" else f"```text\n{content}\n```"


if __name__ == "__main__":
    sys.path.insert(0, str(FOLDER))
    for path in FOLDER.glob("*.ipynb"):
        notebook = executed(json.loads(path.read_text(encoding="utf-8")))
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
