"""Prompts of files, or an error that lists all bad rows."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from ctpo_megatron.data import Prompt, PromptRules, read_prompts


def load_prompts(files: Sequence[str], tokenizer: PreTrainedTokenizerBase, rules: PromptRules) -> list[Prompt]:
    """Raises DataError."""
    found = read_prompts(files, tokenizer, rules)
    found.problems.raise_if_any()
    return found.prompts
