"""A small task of examples/toolmath, shared by the tests of this room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ctpo_sandbox import start_server
from tests.support.deadlines import scaled
from tests.support.task import SMALL_TASK, task_folder


@pytest.fixture(scope="session")
def toolmath() -> Path:
    return task_folder(*SMALL_TASK)


@pytest.fixture(scope="session")
def sandbox_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server for the first trajectories of many dry runs; one that each starts itself costs a CPU-second."""
    log = tmp_path_factory.mktemp("sandbox") / "log"
    with start_server(slots=1, start_timeout_s=scaled(60), log_path=log, tiers=["stdlib"]) as server:
        yield server.url


@pytest.fixture(scope="session")
def tokenizer(toolmath: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(toolmath / "model")
