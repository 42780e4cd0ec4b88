"""A small prepared toolmath directory, shared by the tests of this room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ctpo_megatron.data.toolmath import prepare
from ctpo_sandbox import start_server
from tests.data.toolmath_small import small_config
from tests.support.deadlines import scaled


@pytest.fixture(scope="session")
def toolmath(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data") / "toolmath"
    prepare(small_config(directory))
    return directory


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
