"""GPU memory that is taken only while weights travel from the trainer to the engines. No torch.

Follows vLLM 0.32 (`distributed/weight_transfer/packed_tensor.py`, `model_executor/model_loader/reload`) and
`policy/hf.py`, `policy/hf_share.py`. `tests/rehearsal/test_transfer.py` counts the same bytes while both sides run.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Self

from ctpo_megatron.config import ELEMENT_BYTES, Config, choose_transport
from ctpo_megatron.models import ModelSpec

_VOCABULARY_STEP = 64
"""Rows that vLLM pads a vocabulary to."""


@dataclass(frozen=True)
class TransferMemory:
    """Bytes on each GPU. trainer: of rank zero, which holds most. engine: beyond its weights."""

    trainer: int
    engine: int

    @classmethod
    def of(cls, config: Config, spec: ModelSpec) -> Self:
        """For the transport that `choose_transport` takes on CUDA."""
        element, bucket = ELEMENT_BYTES[config.policy.dtype], config.rollout.weights.bucket_mib << 20
        sizes = sorted((element * prod(shape) for shape in spec.family.tensors(spec).values()), reverse=True)
        # Tied embeddings are the one tensor that is larger than a usual bucket.
        largest, large = sizes[0], sizes[0] if spec.tie_word_embeddings else sizes[0] + sizes[1]
        gathered = _gathered(config, spec, largest)
        loaded = _loaded(config, spec)
        chosen = choose_transport(config.rollout.weights, config.placement, "cuda", cluster=False)
        if chosen == "ipc":
            # One buffer, of which the engine clones what is in it.
            buffer = max(bucket, largest)
            return cls(buffer + gathered, buffer + loaded)
        if chosen == "nccl":
            # Buckets are filled until they are exceeded. Two are under way; each of the engine's two streams keeps the
            # former one while it makes the next.
            copies = 2 if gathered else 1
            return cls(copies * (2 * bucket + large), 4 * bucket + large + loaded)
        return cls(_gathered_columns(config, spec) if chosen == "tcp" else gathered, loaded)


def _gathered(config: Config, spec: ModelSpec, largest: int) -> int:
    """Joined from shards: the largest tensor, which vLLM still holds while the next one is joined, which may take two
    copies."""
    policy = config.policy
    if policy.tensor_model_parallel_size * policy.expert_model_parallel_size == 1:
        return 0
    of_layer = max(prod(shape) for row in spec.family.layer(spec) for shape in row.shapes)
    return largest + 2 * ELEMENT_BYTES[policy.dtype] * of_layer


def _gathered_columns(config: Config, spec: ModelSpec) -> int:
    """Over tcp only matrices that are cut by columns are joined, in two copies; they are in host memory before the
    next one."""
    if config.policy.tensor_model_parallel_size == 1:
        return 0
    cut = (row for row in spec.family.layer(spec) if row.dim not in (None, 0))
    return 2 * ELEMENT_BYTES[config.policy.dtype] * max((prod(shape) for row in cut for shape in row.shapes), default=0)


def _loaded(config: Config, spec: ModelSpec) -> int:
    """The layer that an engine builds again before it copies it, and tensors that wait until their layer is complete.

    These are all experts of a layer, and a vocabulary that vLLM pads: its layer is completed at the end.
    """
    element, rows = ELEMENT_BYTES[config.engine_dtype], [*spec.family.ends(spec), *spec.family.layer(spec)]
    experts = element * spec.num_experts * sum(row.elements for row in rows if row.per_expert)
    layer = max(experts, *(element * row.elements for row in rows if not row.per_expert))
    vocabulary = element * spec.vocab_size * spec.hidden_size if spec.vocab_size % _VOCABULARY_STEP else 0
    return experts + vocabulary + layer // config.rollout.engine.tensor_parallel_size
