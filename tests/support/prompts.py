"""Prompts and conversations of files, or an error that lists all bad rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from ctpo_megatron.data import (
    ConversationRules,
    Prompt,
    PromptRules,
    Trajectory,
    read_conversations,
    read_prompts,
)


def load_prompts(files: Sequence[str], tokenizer: PreTrainedTokenizerBase, rules: PromptRules) -> list[Prompt]:
    """Raises DataError."""
    found = read_prompts(files, tokenizer, rules)
    found.problems.raise_if_any()
    return found.prompts


def load_conversations(files: Sequence[str], tokenizer: PreTrainedTokenizerBase, **rules: Any) -> list[Trajectory]:
    """Raises DataError."""
    found = read_conversations(files, tokenizer, ConversationRules(**rules))
    found.problems.raise_if_any()
    return found.conversations
