"""Fixtures over `ctpo launch`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from ctpo_launchers import environment


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Sequence[str]]:
    """The words with which the launcher's environment was started, which is not made here."""
    words: list[Sequence[str]] = []
    monkeypatch.setattr(environment, "launch", lambda arguments: words.append(arguments) or 0)
    monkeypatch.chdir(tmp_path)
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    return words
