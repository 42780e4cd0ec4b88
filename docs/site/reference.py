"""Writes docs/reference, and the tables of `docs.site.peers`: `make reference`.

Pages of keys, of the command line, of metrics, of the API of four packages and of the memory of models.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ctpo_launchers import node
from ctpo_launchers.clusters import Cluster
from ctpo_megatron import cli
from ctpo_megatron.config import known_keys
from ctpo_megatron.config.keys import Key
from ctpo_megatron.config.problems import show
from ctpo_megatron.tracking import KNOWN_METRICS
from docs.site.peers import DOCS, peer_pages
from docs.site.sizing import chosen, sizing

FOLDER = Path(__file__).resolve().parents[1] / "reference"
HEAD = "<!-- Written by `make reference`. -->\n"
APIS = {
    "answers.md": ("ctpo_answers", "What counts as equal: [answers/README.md](../../answers/README.md)."),
    "kernels.md": ("ctpo_kernels", "How to use them: [kernels/README.md](../../kernels/README.md)."),
    "sandbox.md": ("ctpo_sandbox", "The service and its limits: [sandbox.md](../sandbox.md)."),
}
"""Page -> package, and where its names are explained."""
SIZING = """\
GiB on the fullest rank, as the dry run computes it: bfloat16, distributed optimizer, `recompute: full`, streaming head,
CP = 1, SP with TP, 16,384 tokens a micro-batch, Transformer Engine. P is the number of parameters on that rank. Kept is
what torch's allocator keeps. The formulas are in [parallelism.md](../parallelism.md#memory-of-a-rank). No row has been
trained.
"""
READING = """\
Qwen3-32B does not fit on 8 GPUs: with DP = 1 nothing divides the optimizer state. Qwen3-30B-A3B barely fits on 8 in any
layout, and TP makes its experts 384 or 192 wide, so 16 GPUs are better.

Activations and head grow in proportion to the tokens of a micro-batch. With CP = c, sequences of c x 16,384 tokens cost
the same memory on c times the GPUs.
"""
CHOSEN = """\
## Micro-batch and recomputation
What `policy.micro_batch_tokens: auto` and `policy.recompute: auto` are in the recipes for one GPU, of which 90 % may be
used. [How they are chosen](../parallelism.md#micro-batch-and-recomputation). Seconds are arithmetic for an H100, to
compare choices.
"""
HAND_WRITTEN = {
    "dumps.md",
    "names.md",
    "run_directory.md",
    *(f"keys_of_{peer}.md" for peer in ("trl", "verl", "nemo_rl_and_slime")),
}
"""Pages of the folder that are not generated here. `docs.site.peers` writes the tables of names and keys.

tests/tracking/test_dump_format.py and tests/test_run_paths.py check the others.
"""
METRICS_HEAD = "| metric | unit | definition |\n|---|---|---|\n"


def pages() -> dict[str, str]:
    """Every generated page: its name below docs/reference, and its text."""
    apis = {page: api(importlib.import_module(package), text) for page, (package, text) in APIS.items()}
    return {
        "configuration.md": configuration(),
        "command_line.md": command_line(),
        **apis,
        "launchers.md": launchers(),
        "metrics.md": metrics((FOLDER / "metrics.md").read_text(encoding="utf-8")),
        "sizing.md": memory(),
    }


def configuration() -> str:
    """Every key of a configuration file."""
    introduction = (
        "How files, overrides and errors work: [config.md](../config.md). **Required** means within its section;\n"
        "without the optional sections `prepare` and `sft` that stage does not happen.\n"
    )
    return "\n".join([HEAD, "# Configuration keys\n", introduction, keys()])


def keys() -> str:
    """The tables of all keys, one for each top-level section."""
    lines: list[str] = []
    section = ""
    for key in known_keys():
        top = key.path.split(".")[0]
        if top != section:
            section = top
            lines += ["", f"## {top}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
        kind, meaning = (text.replace("|", "\\|") for text in (key.type, key.meaning))
        lines.append(f"| `{key.path}` | {kind} | {_default(key)} | {meaning} |")
    return "\n".join(lines).strip() + "\n"


def _default(key: Key) -> str:
    if key.required:
        return "**required**"
    value = list(key.default) if isinstance(key.default, tuple) else key.default
    return f"`{show(value)}`"


def command_line() -> str:
    """Every verb of `ctpo` with its arguments, and the program of a node."""
    parts = [HEAD, "# Command line\n", "A word `a.b=c` replaces a [key](configuration.md).\n"]
    for verb, summary in cli.VERBS.items():
        parser = argparse.ArgumentParser(prog=f"ctpo {verb}")
        importlib.import_module(f"ctpo_megatron.cli.{verb}").add_arguments(parser)
        parts += [f"## ctpo {verb}\n", f"{summary[0].upper()}{summary[1:]}.\n", *_arguments(parser)]
    parts += ["## python -m ctpo_launchers.node\n", f"{_first_line(node)}\n", *_arguments(node.parser())]
    return "\n".join(parts)


def api(module: ModuleType, introduction: str) -> str:
    """What a package exports: signatures and docstrings."""
    parts = [HEAD, f"# {module.__name__}\n", f"{introduction}\n"]
    for name in sorted(module.__all__, key=str.lower):
        parts += [f"## {name}\n", *_described(name, getattr(module, name))]
    return "\n".join(parts)


def launchers() -> str:
    """The keys of a cluster file."""
    parts = [HEAD, "# Cluster files\n", f"{inspect.getdoc(Cluster)} How jobs start: [cluster.md](../cluster.md).\n"]
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name, field in Cluster.model_fields.items():
        default = "**required**" if field.is_required() else f"`{field.get_default(call_default_factory=True)}`"
        rows.append(f"| `{name}` | {default} | {_cell(field.description or '')} |")
    return "\n".join([*parts, *rows, ""])


def metrics(page: str) -> str:
    """Fill the tables of the page of metrics, one a heading, from `KNOWN_METRICS`; what is between them stays."""
    sections = {row.section for row in KNOWN_METRICS}
    tables = re.compile(rf"^#+ (.+?)(?: \(.*\))?\n(?:(?!#).*\n)*?{re.escape(METRICS_HEAD)}((?:\|.*\n)*)", re.MULTILINE)
    if absent := sections - {found[1] for found in tables.finditer(page)}:
        raise ValueError(f"metrics.md has no heading with a table of metrics: {', '.join(sorted(absent))}")
    return tables.sub(lambda found: found[0].removesuffix(found[2]) + _metric_rows(found[1]), page)


def _metric_rows(section: str) -> str:
    rows = (row for row in KNOWN_METRICS if row.section == section)
    return "".join(
        f"| {', '.join(f'`{name}`' for name in row.names)} | {row.unit} | {row.definition} |\n" for row in rows
    )


def memory() -> str:
    """GiB of models on 8, 16 and 64 GPUs, and what is chosen on one."""
    return "\n".join([HEAD, "# Memory of models by layout\n", SIZING, sizing(), READING, CHOSEN, chosen()])


def _arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    """A table, and one for each verb within the verb. The layout of `--help` differs between versions of Python."""
    rows = ["| argument | meaning |", "|---|---|"]
    nested: list[str] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                nested += [f"### {parser.prog} {name}\n", *_arguments(inner)]
        elif not isinstance(action, argparse._HelpAction) and action.help != argparse.SUPPRESS:
            meaning = (action.help or "") % {**vars(action), "prog": parser.prog}
            rows.append(f"| {_spelled(action)} | {_cell(meaning)} |")
    if len(rows) > 2:
        yield "\n".join([*rows, ""])
    yield from nested


def _spelled(action: argparse.Action) -> str:
    """As it is typed: `-k N, --samples N`."""
    taken = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    value = "" if action.nargs == 0 else taken if isinstance(taken, str) else " ".join(taken)
    names: Sequence[str] = action.option_strings or [""]
    return f"`{', '.join(f'{name} {value}'.strip() for name in names)}`".replace("|", "\\|")


def _described(name: str, value: Any) -> Iterator[str]:
    if not callable(value):
        entries = "".join(f'    "{entry}",\n' for entry in value)
        yield f"```python\n{name} = (\n{entries})\n```\n"
        return
    yield f"```python\n{name}{_signature(value)}\n```\n"
    yield f"```text\n{inspect.getdoc(value)}\n```\n"
    members = vars(value).items() if inspect.isclass(value) else ()
    for member, function in members:
        if inspect.isfunction(function) and not member.startswith("_") and function.__doc__:
            yield f"### {name}.{member}\n"
            yield f"```python\n{member}{_signature(function)}\n```\n\n```text\n{inspect.getdoc(function)}\n```\n"


def _signature(value: Callable[..., object]) -> str:
    """One parameter a line where they are many. Exceptions take a message."""
    if inspect.isclass(value) and issubclass(value, BaseException):
        return "(message)"
    signature = inspect.signature(value)
    parameters = [
        each.replace(annotation=_Words(each.annotation), default=_named(each.default))
        for each in signature.parameters.values()
    ]
    signature = signature.replace(parameters=parameters, return_annotation=_Words(signature.return_annotation))
    text = _public(str(signature))
    if len(text) <= 90:
        return text
    shown = _public(str(signature.replace(parameters=[]))).removeprefix("()")
    kinds = [parameter.kind for parameter in parameters]
    lines = [f"    {_public(str(parameter))}," for parameter in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        lines.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "    *,")
    return "\n".join(["(", *lines, f"){shown}"])


def _public(text: str) -> str:
    """`pathlib` has other insides in Python 3.13."""
    return text.replace("pathlib._local.", "pathlib.")


class _Words:
    """An annotation without the quotes that it has while it is a string."""

    def __new__(cls, annotation: object) -> object:
        return super().__new__(cls) if isinstance(annotation, str) else annotation

    def __init__(self, annotation: str) -> None:
        self._annotation = annotation

    def __repr__(self) -> str:
        return self._annotation


def _named(default: Any) -> Any:
    """A default; functions in it by their names, not by their addresses."""
    if isinstance(default, tuple) and any(map(inspect.isfunction, default)):
        return _Words(f"({', '.join(function.__name__ for function in default)})")
    return default


def _first_line(module: ModuleType) -> str:
    return (module.__doc__ or "").strip().splitlines()[0]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for page, text in pages().items():
        (FOLDER / page).write_text(text, encoding="utf-8")
    for page, text in peer_pages().items():
        (DOCS / page).write_text(text, encoding="utf-8")
