"""A small prepared toolmath directory, shared by the tests of this room."""

from __future__ import annotations

from pathlib import Path

import pytest

from ctpo_megatron.data.toolmath import prepare
from tests.data.toolmath_small import small_config


@pytest.fixture(scope="session")
def toolmath(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data") / "toolmath"
    prepare(small_config(directory))
    return directory


@pytest.fixture(scope="session")
def tokenizer(toolmath: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(toolmath / "model")
