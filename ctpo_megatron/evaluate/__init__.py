"""`ctpo eval`: held-out prompts answered and scored without a trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ctpo_megatron.base.front_door import import_when_used
from ctpo_megatron.evaluate.target import Target, find_target, read_config

if TYPE_CHECKING:  # which starts engines
    from ctpo_megatron.evaluate.command import Outcome, evaluate

__all__ = ["Outcome", "Target", "evaluate", "find_target", "read_config"]

__getattr__ = import_when_used(__name__)
