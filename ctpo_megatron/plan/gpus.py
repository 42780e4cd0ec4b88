"""What fills each GPU of a node in a step, on both sides, and the cheapest changes where it does not fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Self, TypeVar

from pydantic import BaseModel

from ctpo_megatron.config import Config, Job, Placement, Problem, choose_transport, error, needs_engines
from ctpo_megatron.models import ModelSpec
from ctpo_megatron.plan.memory import (
    ELEMENT_BYTES,
    GIB,
    USABLE,
    Split,
    cache_bytes,
    gib,
    head_chunk_rows,
    model_parameters,
    peak_memory,
)

ASLEEP = 2 * GIB
"""What a sleeping engine keeps: CUDA context, NCCL, workspaces, captured graphs. An estimate."""

SENT = "while weights are sent"
_VOCABULARY_STEP = 64
"""Rows that vLLM pads a vocabulary to."""

T = TypeVar("T", bound=BaseModel)


def check_gpu_memory(config: Config, spec: ModelSpec, job: Job, gpu_gib: float) -> Iterator[Problem]:
    """Compare the peak of every GPU of the node with `gpu_gib`, with the cheapest changes that help."""
    share, least = config.rollout.engine.gpu_memory_utilization, least_of_engine(config, spec)
    if needs_engines(config) and share * gpu_gib * GIB < least:
        message = f"of {gpu_gib:g} GiB cannot hold the model and one longest sequence, {gib(least)} on each GPU"
        needed = math.ceil(100 * least / (gpu_gib * GIB)) / 100
        fix = f"set at least {needed:g}" if needed <= USABLE else "raise rollout.engine.tensor_parallel_size"
        yield error(config, "rollout.engine.gpu_memory_utilization", message, fix)
    memory = GpuMemory(config, job, spec, gpu_gib)
    fullest = memory.fullest
    if fullest.bytes <= memory.usable:
        return
    parts = " + ".join(f"{name} {gib(size)}" for name, size in fullest.parts.items())
    message = (
        f"{fullest.gpus}: {gib(fullest.bytes)} of {gpu_gib:g} GiB {fullest.when} ({parts}); "
        f"{1 - USABLE:.0%} are kept for CUDA and NCCL"
    )
    changes = memory.cheapest_changes()
    enough = any(size <= memory.usable for _, size in changes)
    named = ", ".join(f"{change} ({gib(size)})" for change, size in changes) or "none"
    advice = "cheapest changes" if enough else "no single change is enough, use more GPUs; those that save most"
    yield error(config, "placement.mode", message, f"{advice}: {named}")


@dataclass(frozen=True)
class Moment:
    """Bytes on each of some GPUs at one moment of a step, by who has them."""

    gpus: str
    when: str
    parts: dict[str, float]

    @property
    def bytes(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True)
class GpuMemory:
    """What fills each GPU of a node, of `gpu_gib`, in a step of a configuration."""

    config: Config
    job: Job
    spec: ModelSpec
    gpu_gib: float

    @property
    def usable(self) -> float:
        """Bytes of a GPU."""
        return USABLE * self.gpu_gib * GIB

    @property
    def split(self) -> Split:
        """The trainer's, with as many rows of logits as it takes on such GPUs."""
        split = Split.of(self.config.policy, self.job.world_size)
        if split.streaming_head:
            split = replace(split, head_chunk_tokens=head_chunk_rows(self.spec, split, self.gpu_gib * GIB))
        return split

    @property
    def update(self) -> Moment:
        """The moment that depends on micro-batches and recomputation."""
        placed = Placement.of(self.config, self.job)
        parts: dict[str, float] = {"trainer": peak_memory(self.spec, self.split).total}
        if placed.engines and self.config.placement.mode == "colocated":
            return Moment(_named(placed.engines), "in an update", {**parts, "sleeping engine": ASLEEP})
        return Moment(_named(placed.trainer), "in an update", parts)

    @property
    def moments(self) -> tuple[Moment, ...]:
        """All moments that fill a GPU; an engine takes its `gpu_memory_utilization`."""
        config, update = self.config, self.update
        placed = Placement.of(config, self.job)
        most = peak_memory(self.spec, self.split)
        held = config.rollout.engine.gpu_memory_utilization * self.gpu_gib * GIB
        trainer, engines = _named(placed.trainer), _named(placed.engines)
        if not placed.engines:
            return (update,)
        transfer = TransferMemory.of(config, self.spec)
        if config.placement.mode == "colocated":
            sent = {  # the engine sleeps, takes weights while the trainer has its own, then samples
                "trainer": most.while_sampling("none"),
                "engine's weights": _weights(config, self.spec) + ASLEEP,
                "transfer": transfer.trainer + transfer.engine,
            }
            sampling = {"trainer": most.while_sampling(config.policy.offload), "engine": held}
            return (update, Moment(engines, SENT, sent), Moment(engines, "while sampling", sampling))
        return (
            update,
            Moment(trainer, SENT, {"trainer": most.while_sampling("none"), "transfer": transfer.trainer}),
            Moment(engines, SENT, {"engine": held, "transfer": transfer.engine}),
            Moment(engines, "while sampling", {"engine": held}),
        )

    @property
    def fullest(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.bytes)

    def table(self) -> list[tuple[str, str, str]]:
        """Rows (which GPUs and when, size, of whom)."""
        return [
            (
                f"{moment.gpus}, {moment.when}",
                gib(moment.bytes),
                ("" if moment.bytes <= self.usable else f"TOO MUCH for {self.gpu_gib:g} GiB; ")
                + " + ".join(f"{name} {gib(size)}" for name, size in moment.parts.items()),
            )
            for moment in self.moments
        ]

    def cheapest_changes(self) -> list[tuple[str, float]]:
        """At most three changes and the fullest moment (bytes) after each.

        First those that suffice, by what they cost in speed; without three of them, those that save most.
        """
        before = self.fullest.bytes
        tried = []
        for change in self._changes():
            after = self._with(change).fullest.bytes
            if after < before:
                tried.append((" ".join(f"{key}={value}".lower() for key, value in change.items()), after))
        enough = [item for item in tried if item[1] <= self.usable]
        others = sorted((item for item in tried if item not in enough), key=lambda item: item[1])
        return [*enough, *others][:3]

    def _with(self, change: Mapping[str, object]) -> GpuMemory:
        config = self.config
        for key, value in change.items():
            config = _with(config, key.split("."), value)
        return replace(self, config=config)

    def _changes(self) -> Iterator[Mapping[str, object]]:
        """From those that cost nothing to those that cost most."""
        config, spec, job = self.config, self.spec, self.job
        policy, engine = config.policy, config.rollout.engine
        replicas = Split.of(policy, job.world_size)
        if not policy.use_distributed_optimizer and replicas.data * replicas.context > 1:
            yield {"policy.use_distributed_optimizer": True}
        if policy.use_distributed_optimizer and policy.dtype != "float32" and config.placement.mode == "colocated":
            for what in ("optimizer", "all"):
                if policy.offload not in (what, "all"):
                    yield {"policy.offload": what}
        smallest = least_of_engine(config, spec) / (self.gpu_gib * GIB)
        for share in (0.5, 0.4, 0.3):
            if smallest <= share < engine.gpu_memory_utilization:
                yield {"rollout.engine.gpu_memory_utilization": share}
        if policy.chosen.recompute != "full":
            yield {"policy.recompute": "full"}
        longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
        if policy.chosen.micro_batch_tokens // 2 >= longest:
            yield {"policy.micro_batch_tokens": policy.chosen.micro_batch_tokens // 2}
        placed, more = Placement.of(config, job), 2 * engine.tensor_parallel_size
        if (
            config.rollout.engines == "auto"
            and spec.num_attention_heads % more == 0
            and len(placed.engines) % more == 0
        ):
            yield {"rollout.engine.tensor_parallel_size": more}
        wider = 2 * policy.tensor_model_parallel_size
        if replicas.data % 2 == 0 and spec.num_key_value_heads % wider == 0:
            yield {"policy.tensor_model_parallel_size": wider, "policy.sequence_parallel": True}
        apart = config.placement.mode == "disaggregated" and len(placed.engines) <= len(placed.trainer)
        if apart and policy.use_distributed_optimizer and policy.dtype != "float32":
            yield {"placement.mode": "colocated", "policy.offload": "all"}


@dataclass(frozen=True)
class TransferMemory:
    """Bytes on each GPU only while weights travel. trainer: of rank zero, which has most. engine: beyond its weights.

    Follows vLLM 0.32 (`distributed/weight_transfer/packed_tensor.py`, `model_executor/model_loader/reload`) and
    `policy/hf.py`. `tests/rehearsal/test_transfer.py` counts the same bytes while both sides run.
    """

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
        chosen = choose_transport(config.rollout.weights, config.placement, "cuda")
        if chosen == "ipc":
            # One buffer, of which the engine clones what is in it.
            buffer = max(bucket, largest)
            return cls(buffer + gathered, buffer + loaded)
        if chosen == "nccl":
            # Buckets are filled until they are exceeded. Two are under way; each of the engine's two streams keeps the
            # former one while it makes the next.
            copies = 2 if gathered else 1
            return cls(copies * (2 * bucket + large), 4 * bucket + large + loaded)
        return cls(gathered, loaded)


def _gathered(config: Config, spec: ModelSpec, largest: int) -> int:
    """Joined from shards: the largest tensor, which vLLM still holds while the next one is joined, which may take two
    copies."""
    policy = config.policy
    if policy.tensor_model_parallel_size * policy.expert_model_parallel_size == 1:
        return 0
    of_layer = max(prod(shape) for row in spec.family.layer(spec) for shape in row.shapes)
    return largest + 2 * ELEMENT_BYTES[policy.dtype] * of_layer


def _loaded(config: Config, spec: ModelSpec) -> int:
    """The layer that an engine builds again before it copies it, and tensors that wait until their layer is complete.

    These are all experts of a layer, and a vocabulary that vLLM pads: its layer is completed at the end.
    """
    element, rows = ELEMENT_BYTES[config.engine_dtype], [*spec.family.ends(spec), *spec.family.layer(spec)]
    experts = element * spec.num_experts * sum(row.elements for row in rows if row.per_expert)
    layer = max(experts, *(element * row.elements for row in rows if not row.per_expert))
    vocabulary = element * spec.vocab_size * spec.hidden_size if spec.vocab_size % _VOCABULARY_STEP else 0
    return experts + vocabulary + layer // config.rollout.engine.tensor_parallel_size


def _weights(config: Config, spec: ModelSpec) -> float:
    """Bytes of the model on each GPU of an engine."""
    whole = model_parameters(spec)[0] * ELEMENT_BYTES[config.engine_dtype]
    return whole / config.rollout.engine.tensor_parallel_size


def least_of_engine(config: Config, spec: ModelSpec) -> float:
    """Bytes with which an engine can start: weights, keys and values of one longest sequence, what it keeps asleep."""
    sequence = cache_bytes(config, spec) * config.rollout.engine.max_model_len
    return _weights(config, spec) + sequence + ASLEEP


def _with(section: T, path: list[str], value: object) -> T:
    """A copy of a section with the key at `path` below it changed."""
    name, *rest = path
    return section.model_copy(update={name: _with(getattr(section, name), rest, value) if rest else value})


def _named(gpus: range) -> str:
    """`GPU 3`, `GPUs 0 to 3`."""
    return f"GPU {gpus.start}" if len(gpus) == 1 else f"GPUs {gpus.start} to {gpus.stop - 1}"
