"""Data: prompt files, conversations, prompts, trajectories and batches, packing, the toolmath task.

Names are imported on first use, so that reward workers and tools that need no tensors do not load torch, and
checks before a run do not load numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ctpo_megatron.data.batch import Batch, Group
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.data.tool_call import ToolCall

if TYPE_CHECKING:
    from ctpo_megatron.data.conversations import (
        ConversationRules,
        ConversationSet,
        batch_order,
        batches,
        load_conversations,
        read_conversations,
    )
    from ctpo_megatron.data.curriculum import Curriculum, sampler_problem
    from ctpo_megatron.data.messages import ChatMessage, check_messages, check_tools, plain_messages, plain_tools
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
    from ctpo_megatron.data.problems import DataError
    from ctpo_megatron.data.prompts import PromptRules, PromptSet, read_prompts
    from ctpo_megatron.data.rows import Cell, RowSet, RowTokens, prompt_ids
    from ctpo_megatron.data.sampler import MixedFile, PromptMix, PromptSampler, PromptStream
    from ctpo_megatron.data.stored import StoredRows
    from ctpo_megatron.data.tables import count_all_rows
    from ctpo_megatron.data.toolmath import prepare
    from ctpo_megatron.data.trajectory import Trajectory

_MODULES = {
    "Cell": "rows",
    "ChatMessage": "messages",
    "ConversationRules": "conversations",
    "ConversationSet": "conversations",
    "DataError": "problems",
    "PackedBatch": "packing",
    "PackingRules": "packing",
    "PromptRules": "prompts",
    "Curriculum": "curriculum",
    "sampler_problem": "curriculum",
    "MixedFile": "sampler",
    "PromptMix": "sampler",
    "PromptSampler": "sampler",
    "PromptStream": "sampler",
    "PromptSet": "prompts",
    "RowSet": "rows",
    "RowTokens": "rows",
    "StoredRows": "stored",
    "TokenSequence": "packing",
    "Trajectory": "trajectory",
    "batch_order": "conversations",
    "batches": "conversations",
    "check_messages": "messages",
    "check_tools": "messages",
    "count_all_rows": "tables",
    "load_conversations": "conversations",
    "micro_batch_count": "packing",
    "pack": "packing",
    "plain_messages": "messages",
    "plain_tools": "messages",
    "prepare": "toolmath",
    "prompt_ids": "rows",
    "read_conversations": "conversations",
    "read_prompts": "prompts",
    "split_evenly": "packing",
    "token_sequences": "packing",
    "with_turns": "packing",
}

__all__ = [
    "Batch",
    "Cell",
    "ChatMessage",
    "ConversationRules",
    "ConversationSet",
    "Curriculum",
    "DataError",
    "Group",
    "MixedFile",
    "PackedBatch",
    "PackingRules",
    "Prompt",
    "PromptMix",
    "PromptRules",
    "PromptSampler",
    "PromptSet",
    "PromptStream",
    "RowSet",
    "RowTokens",
    "StoredRows",
    "TokenSequence",
    "ToolCall",
    "Trajectory",
    "batch_order",
    "batches",
    "check_messages",
    "check_tools",
    "count_all_rows",
    "load_conversations",
    "micro_batch_count",
    "pack",
    "plain_messages",
    "plain_tools",
    "prepare",
    "prompt_ids",
    "read_conversations",
    "read_prompts",
    "sampler_problem",
    "split_evenly",
    "token_sequences",
    "with_turns",
]


def __getattr__(name: str) -> Any:
    """Import the module of a front-door name."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
