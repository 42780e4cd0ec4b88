"""Settings of a toolmath directory small enough to be built in a test."""

from __future__ import annotations

from pathlib import Path

from ctpo_megatron.config.task_schema import PrepareConfig


def small_config(directory: Path, **changes: object) -> PrepareConfig:
    sizes = {"train_prompts": 70, "heldout_prompts": 28, "sft_conversations": 400, "tokenizer_conversations": 400}
    return PrepareConfig(directory=str(directory), **{**sizes, **changes})
