"""`python -m examples.toolmath DIRECTORY [--early-choice] [KEY=VALUE ...]`: writes the task, unless it is there."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from examples.toolmath import Task, TaskError, write_task


def main() -> int:
    """Write the task; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.toolmath", description="Write the quickstart's task.")
    parser.add_argument("directory", type=Path, help="such as data/toolmath, which configs/quickstart.yaml names")
    parser.add_argument(
        "settings", nargs="*", metavar="KEY=VALUE", help="such as seed=1, tool_parser=fenced, model.hidden_size=128"
    )
    parser.add_argument(
        "--early-choice", action="store_true", help="questions whose first call decides which later answer is right"
    )
    options = parser.parse_intermixed_args()
    try:
        tree = _tree(options.settings)
        if options.early_choice:
            tree.setdefault("early_choice", {})
        task = Task.model_validate(tree)
        written = write_task(task, options.directory)
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}, not {each['input']!r}" for each in error.errors()]
        parser.error("; ".join(wrong))
    except (TaskError, ValueError) as error:
        parser.error(str(error))
    print(f"{options.directory}: {'written' if written else 'is there already'}")
    return 0


def _tree(texts: list[str]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"{text!r} is no KEY=VALUE")
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = yaml.safe_load(value)
    return tree


if __name__ == "__main__":
    sys.exit(main())
