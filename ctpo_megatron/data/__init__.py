"""Data room: prompt files, the records of the ring, and packing into training batches."""

from ctpo_megatron.data.records import Group, Prompt, ToolCall, Trajectory

__all__ = ["Group", "Prompt", "ToolCall", "Trajectory"]
