"""Whether a checkpoint fits this model, precision and optimizer: lists every difference before anything is loaded."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.dist_checkpointing.validation import determine_global_metadata

from ctpo_megatron.models import ModelSpec, padded_vocabulary
from ctpo_megatron.policy.checkpoint_files import CheckpointError

log = logging.getLogger(__name__)

_MOST_TENSOR_PARALLEL = 64


def model_settings(spec: ModelSpec) -> dict[str, Any]:
    """Properties of the model other than its tensors, by name, for `check_settings`."""
    return {f"{name} of model.path": value for name, value in spec.unseen.items()}


def check_settings(checkpoint: Path, saved: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raises CheckpointError naming the keys whose values differ."""
    other = [f"{key} was {saved[key]} and is {ours[key]}" for key in saved if key in ours and saved[key] != ours[key]]
    if other:
        raise CheckpointError(
            f"{checkpoint} was written under another configuration; nothing was loaded: {'; '.join(other)}. Give the "
            "former value, or start a new run from an export of it"
        )


def check_fit(checkpoint: Path, wanted: dict[str, Any], vocab_size: int, *, weights_only: bool = False) -> None:
    """Compare what all ranks request with what the checkpoint holds; raises CheckpointError with every difference.

    weights_only: the rest of the checkpoint is ignored, and the precision may differ.
    """
    sharded, _, _ = load_preprocess(wanted)
    _, by_rank = determine_global_metadata(extract_sharded_base(sharded)[0])
    ours = {part.key: part for rank in by_rank for part in rank}
    saved = {part.key: part for part in load_sharded_metadata(str(checkpoint)).values()}
    problems = [f"{key} is not in the checkpoint" for key in sorted(ours.keys() - saved.keys())]
    surplus = [] if weights_only else sorted(saved.keys() - ours.keys())
    problems += [f"{key} is not in this model and optimizer" for key in surplus]
    for key in sorted(ours.keys() & saved.keys()):
        there = _as_converted(saved[key], ours[key]) if weights_only else saved[key]
        have, want = _form(there), _form(ours[key])
        # The padding of the vocabulary depends on the tensor-parallel size: megatron truncates or extends it.
        if have != want and not _padded_differently(there, ours[key], vocab_size):
            problems.append(f"{key} is {have} in the checkpoint and {want} here")
    if problems:
        raise CheckpointError(
            f"{checkpoint} is of another model, precision or optimizer; nothing was loaded:\n  "
            + "\n  ".join(problems)
            + "\nContinue with the model.path and policy of the run that wrote it"
        )


def _as_converted(
    saved: ShardedTensor | ShardedObject, ours: ShardedTensor | ShardedObject
) -> ShardedTensor | ShardedObject:
    """`saved` with the precision of `ours`: torch converts when it copies into a tensor of another dtype."""
    if not (isinstance(saved, ShardedTensor) and isinstance(ours, ShardedTensor)) or saved.dtype == ours.dtype:
        return saved
    log.info("%s is converted from %s to %s", saved.key, saved.dtype, ours.dtype)
    return dataclasses.replace(saved, dtype=ours.dtype)


def _padded_differently(
    saved: ShardedTensor | ShardedObject, ours: ShardedTensor | ShardedObject, vocab_size: int
) -> bool:
    if not (isinstance(saved, ShardedTensor) and isinstance(ours, ShardedTensor) and ours.allow_shape_mismatch):
        return False
    rows = {padded_vocabulary(vocab_size, tensor_parallel) for tensor_parallel in range(1, 1 + _MOST_TENSOR_PARALLEL)}
    return (
        saved.dtype == ours.dtype and saved.global_shape[1:] == ours.global_shape[1:] and saved.global_shape[0] in rows
    )


def _form(part: ShardedTensor | ShardedObject) -> str:
    shape = "x".join(map(str, part.global_shape))
    return f"{str(part.dtype).removeprefix('torch.')} {shape}" if isinstance(part, ShardedTensor) else f"object {shape}"
