"""What several tests of this folder need."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from ctpo_megatron.config import PolicyConfig
from ctpo_megatron.policy import Layout, destroy_distributed, init_distributed
from tests.policy import models


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory: Qwen3 of two layers."""
    directory = tmp_path_factory.mktemp("model")
    models.build("qwen3-tied", directory, layers=2)
    return directory


@pytest.fixture(scope="module")
def layout() -> Iterator[Layout]:
    """One rank, this process."""
    yield init_distributed(PolicyConfig(), seed=0)
    destroy_distributed()


@pytest.fixture
def file_limit() -> Callable[[int], AbstractContextManager[None]]:
    """Within it no file of this process and those it starts can grow beyond so many bytes."""

    @contextmanager
    def limited(size: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, before)

    return limited
