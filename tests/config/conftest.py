"""A small valid configuration and helpers to spoil it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ctpo_megatron.config import Config, ConfigError, load_config
from tests.support.task import SMALL_TASK, task_folder

BASE = """\
run: {name: first, steps: 4}
model: {path: data/model}
data:
  train: [data/train.parquet]
  max_prompt_tokens: 64
  tool_in_prompt: false
policy: {micro_batch_tokens: 1024}
rollout:
  max_response_tokens: 176
  engine: {max_model_len: 256, kv_cache_mb: 64, dtype: float32}
"""


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file, in a folder with its task that is also the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(task_folder(*SMALL_TASK))
    file = tmp_path / "base.yaml"
    file.write_text(BASE)
    return file


@pytest.fixture
def config_with(base: Path) -> Callable[..., Config]:
    """The small configuration with overrides."""
    return lambda *overrides: load_config(base, overrides)


@pytest.fixture
def refusal(base: Path) -> Callable[..., list[str]]:
    """The problems that overrides, and text appended to the file, cause."""

    def load(*overrides: str, append: str = "") -> list[str]:
        base.write_text(BASE + append)
        with pytest.raises(ConfigError) as caught:
            load_config(base, overrides)
        return [str(problem) for problem in caught.value.problems]

    return load
