"""Reads weights back from an engine after an update, as a process of its own: the check is part of the checkout."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_MODULE = "tests.weights.read_back_engine"
_ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 900.0


def read_back() -> Iterator[tuple[str, str]]:
    """Yield what was checked and its problem, "" where every tensor is as it was sent; nothing without an engine.

    A line is of one tiny model: dense, with a tied head, and with experts.
    """
    if importlib.util.find_spec("vllm") is None or not _ROOT.joinpath(*_MODULE.split(".")).with_suffix(".py").is_file():
        return
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, sys.path)])}
    command = [sys.executable, "-m", _MODULE]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, cwd=_ROOT
    )
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for result in results:
        different = ", ".join([*result["wrong"], *(f"{name} (not read back)" for name in result["missing"])])
        yield f"weights of an engine, {result['model']}", different
    if done.returncode and not any(result["wrong"] or result["missing"] for result in results):
        yield "weights of an engine", (done.stdout + done.stderr)[-3000:]
