"""Data room: prompt files, the records of the ring, and packing into training batches."""

from ctpo_megatron.data.conversations import batches, load_conversations
from ctpo_megatron.data.pack import PackedBatch, pack, split_evenly
from ctpo_megatron.data.prompts import PromptSampler, load_prompts
from ctpo_megatron.data.records import Group, Prompt, ToolCall, Trajectory
from ctpo_megatron.data.tables import DataError

__all__ = [
    "DataError",
    "Group",
    "PackedBatch",
    "Prompt",
    "PromptSampler",
    "ToolCall",
    "Trajectory",
    "batches",
    "load_conversations",
    "load_prompts",
    "pack",
    "split_evenly",
]
