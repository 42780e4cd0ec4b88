"""Data: prompt files, conversations, prompts, trajectories and batches, packing.

Names are imported on first use, so that reward workers and tools that need no tensors do not load torch, and
checks before a run do not load numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ctpo_megatron.data.batch import Batch, Group
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.data.tool_call import TOOL_STATUSES, ToolCall

if TYPE_CHECKING:
    from ctpo_megatron.data.conversations import (
        ConversationRules,
        ConversationSet,
        batch_order,
        batches,
        read_conversations,
    )
    from ctpo_megatron.data.curriculum import Curriculum, sampler_problem
    from ctpo_megatron.data.data_files import data_stem, find_files, resolved_files
    from ctpo_megatron.data.forest import Forest, PrefixOrder, PrefixSegment
    from ctpo_megatron.data.marks import marked, marked_messages, rfind_token, special_tokens, token_ids, unmarked
    from ctpo_megatron.data.messages import ChatMessage, check_messages, check_tools, plain_messages, plain_tools
    from ctpo_megatron.data.numbers import number_doubt, number_text
    from ctpo_megatron.data.packing import (
        PackedBatch,
        PackingRules,
        TokenSequence,
        micro_batch_count,
        pack,
        split_evenly,
        token_sequences,
        with_turns,
    )
    from ctpo_megatron.data.problems import DataError, Problems
    from ctpo_megatron.data.prompts import PromptRules, PromptSet, read_prompts
    from ctpo_megatron.data.rows import Cell, RowSet, prompt_ids
    from ctpo_megatron.data.sampler import MixedFile, PromptMix, PromptSampler, PromptStream
    from ctpo_megatron.data.tables import Table, count_all_rows, read_rows
    from ctpo_megatron.data.trajectory import Trajectory

_MODULES = {
    "conversations": ("ConversationRules", "ConversationSet", "batch_order", "batches", "read_conversations"),
    "curriculum": ("Curriculum", "sampler_problem"),
    "data_files": ("data_stem", "find_files", "resolved_files"),
    "forest": ("Forest", "PrefixOrder", "PrefixSegment"),
    "marks": ("marked", "marked_messages", "rfind_token", "special_tokens", "token_ids", "unmarked"),
    "messages": ("ChatMessage", "check_messages", "check_tools", "plain_messages", "plain_tools"),
    "numbers": ("number_doubt", "number_text"),
    "packing": (
        *("PackedBatch", "PackingRules", "TokenSequence", "micro_batch_count", "pack", "split_evenly"),
        *("token_sequences", "with_turns"),
    ),
    "problems": ("DataError", "Problems"),
    "prompts": ("PromptRules", "PromptSet", "read_prompts"),
    "rows": ("Cell", "RowSet", "prompt_ids"),
    "sampler": ("MixedFile", "PromptMix", "PromptSampler", "PromptStream"),
    "tables": ("Table", "count_all_rows", "read_rows"),
    "trajectory": ("Trajectory",),
}
"""Module -> the names that it has."""


def __getattr__(name: str) -> Any:
    """Import the module of a front-door name."""
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "TOOL_STATUSES",
    "Batch",
    "Cell",
    "ChatMessage",
    "ConversationRules",
    "ConversationSet",
    "Curriculum",
    "DataError",
    "Forest",
    "Group",
    "MixedFile",
    "PackedBatch",
    "PackingRules",
    "PrefixOrder",
    "PrefixSegment",
    "Problems",
    "Prompt",
    "PromptMix",
    "PromptRules",
    "PromptSampler",
    "PromptSet",
    "PromptStream",
    "RowSet",
    "Table",
    "TokenSequence",
    "ToolCall",
    "Trajectory",
    "batch_order",
    "batches",
    "check_messages",
    "check_tools",
    "count_all_rows",
    "data_stem",
    "find_files",
    "marked",
    "marked_messages",
    "micro_batch_count",
    "number_doubt",
    "number_text",
    "pack",
    "plain_messages",
    "plain_tools",
    "prompt_ids",
    "read_conversations",
    "read_prompts",
    "read_rows",
    "resolved_files",
    "rfind_token",
    "sampler_problem",
    "special_tokens",
    "split_evenly",
    "token_ids",
    "token_sequences",
    "unmarked",
    "with_turns",
]
