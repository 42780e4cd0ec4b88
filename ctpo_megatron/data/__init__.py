"""Data: prompt files, conversations, prompts, trajectories and batches, packing.

Names are imported on first use, so that reward workers and tools that need no tensors do not load torch, and
checks before a run do not load numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctpo_megatron.base.front_door import import_when_used
from ctpo_megatron.data.records import TOOL_STATUSES, Prompt, ToolCall

if TYPE_CHECKING:
    from ctpo_megatron.data.conversations import (
        ConversationRules,
        ConversationSet,
        batch_order,
        batches,
        read_conversations,
    )
    from ctpo_megatron.data.conversion import PromptColumns, prompt_columns
    from ctpo_megatron.data.curriculum import Curriculum, sampler_problem
    from ctpo_megatron.data.data_files import data_stem, find_files
    from ctpo_megatron.data.forest import Forest, PrefixOrder, PrefixSegment
    from ctpo_megatron.data.hub import HubError, HubFiles, hub_files
    from ctpo_megatron.data.marks import calls_problem, marked, marked_messages, render, special_tokens, token_ids
    from ctpo_megatron.data.messages import ChatMessage, check_messages, check_tools, plain_messages, plain_tools
    from ctpo_megatron.data.numbers import number_text, number_warning
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
    from ctpo_megatron.data.rows import Cell, RowSet
    from ctpo_megatron.data.sampler import MixedFile, PromptMix, PromptSampler, PromptStream
    from ctpo_megatron.data.tables import Table, count_all_rows, open_table, read_rows
    from ctpo_megatron.data.trajectory import Batch, Group, Trajectory

__getattr__ = import_when_used(__name__)

__all__ = ["Batch", "ChatMessage", "Group", "Prompt", "ToolCall", "Trajectory"]
"""What users' parts import."""
