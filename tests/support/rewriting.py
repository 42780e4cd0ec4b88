"""What pytest makes of files of tests, written once before its processes start.

In a fresh checkout each of five processes would rewrite the assertions of all files at the same time: 5 CPU-s each.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

from tests.support.prefork import ROOT


def write_bytecode(config: pytest.Config) -> None:
    """Rewrite all files of tests that were not, unless no bytecode is to be written.

    Does nothing where another version of pytest keeps this elsewhere: its processes do it then.
    """
    if sys.dont_write_bytecode:
        return
    with suppress(AttributeError, KeyError, SyntaxError):  # the last is reported where the file is collected
        state = config.stash[rewrite.assertstate_key]
        for path in _files():
            file = rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)
            if rewrite.try_makedirs(file.parent) and rewrite._read_pyc(path, file) is None:
                source, code = rewrite._rewrite_test(path, config)
                rewrite._write_pyc(state, code, source, file)


def _files() -> Iterator[Path]:
    for folder in (ROOT / "tests", ROOT / "answers" / "tests"):
        yield from (path for path in folder.rglob("*.py") if path.name.startswith("test_") or path.stem == "conftest")
