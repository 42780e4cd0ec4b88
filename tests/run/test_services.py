"""What rank zero refuses before it starts anything."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import Qwen3Config

from ctpo_megatron.config import ConfigError
from ctpo_megatron.data import DataError
from ctpo_megatron.run import start_services
from ctpo_megatron.tracking import Phases
from tests.engines.tiny_model import tiny_tokenizer
from tests.tracking.synthetic_run import make_config


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What became of the engines, which are not started here."""
    events: list[str] = []

    @contextmanager
    def opened(*_: object, **__: object) -> Iterator[None]:
        events.append("began to load")
        try:
            yield
        finally:
            events.append("closed")

    monkeypatch.setattr("ctpo_megatron.engines.open_engines", opened)
    return events


@pytest.mark.parametrize("surplus", [0, 1])
def test_a_tokenizer_of_more_tokens_than_the_model_is_refused(tmp_path: Path, surplus: int, engines: list[str]) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    rows = len(tokenizer) - surplus
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen3Config(vocab_size=rows, hidden_size=8, num_hidden_layers=1, **heads)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path)
    ours = make_config(
        tmp_path,
        model={"path": str(tmp_path)},
        data={"train": [str(tmp_path / "none.parquet")], "tool_in_prompt": False},
    )
    message = f"has {rows + 1} tokens, but the model's vocabulary {rows} "
    # Without a surplus it goes on to the prompts, which are not there.
    error, message = (ConfigError, message) if surplus else (DataError, "none.parquet")
    with pytest.raises(error, match=message), start_services(ours, tmp_path, Phases(), threading.Event()):
        pass
    # Engines load while prompts are read, and do not stay when these are wrong.
    assert engines == ([] if surplus else ["began to load", "closed"])
