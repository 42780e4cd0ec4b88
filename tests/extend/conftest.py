"""Folders that a test lets this process import from are gone after it."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def _own_search_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
