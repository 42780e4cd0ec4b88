"""Memory of both sides on each GPU of a node, moment by moment, and the cheapest changes where it is too much."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel

from ctpo_megatron.config.memory import GIB, USABLE, Memory, Split, gib, parameters, peak
from ctpo_megatron.config.placement import Job, Placement
from ctpo_megatron.config.schema import Config
from ctpo_megatron.models import ModelSpec

ASLEEP = 2 * GIB
"""What a sleeping engine keeps: CUDA context, NCCL, workspaces, captured graphs. An estimate."""

T = TypeVar("T", bound=BaseModel)
_BYTES = {"float32": 4, "bfloat16": 2}


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
    """All moments that fill a GPU."""

    moments: tuple[Moment, ...]

    @classmethod
    def of(cls, config: Config, job: Job, spec: ModelSpec, gpu_gib: float) -> GpuMemory:
        """Engines take `gpu_memory_utilization` of a GPU of `gpu_gib`."""
        placed = Placement.of(config, job)
        most = peak(spec, Split.of(config.policy, job.world_size))
        held = config.rollout.engine.gpu_memory_utilization * gpu_gib * GIB
        if config.placement.mode == "colocated" and placed.engines:
            moments = _shared(config, spec, most, held, _named(placed.engines))
        else:
            alone = Moment(_named(placed.engines), "while sampling", {"engine": held})
            moments = (Moment(_named(placed.trainer), "in an update", {"trainer": most.total}),)
            moments += (alone,) if placed.engines else ()
        return cls(moments)

    @property
    def fullest(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.bytes)

    def table(self, gpu_gib: float) -> list[tuple[str, str, str]]:
        """Rows (which GPUs and when, size, of whom)."""
        return [
            (
                f"{moment.gpus}, {moment.when}",
                gib(moment.bytes),
                ("" if moment.bytes <= USABLE * gpu_gib * GIB else f"TOO MUCH for {gpu_gib:g} GiB; ")
                + " + ".join(f"{name} {gib(size)}" for name, size in moment.parts.items()),
            )
            for moment in self.moments
        ]


def _shared(config: Config, spec: ModelSpec, most: Memory, held: float, gpus: str) -> tuple[Moment, ...]:
    """Colocated: the engine sleeps, takes weights while the trainer has its own, then samples."""
    policy = config.policy
    return (
        Moment(gpus, "in an update", {"trainer": most.total, "sleeping engine": ASLEEP}),
        Moment(
            gpus,
            "while weights are sent",
            {"trainer": most.while_sampling("none"), "engine's weights": _weights(config, spec) + ASLEEP},
        ),
        Moment(gpus, "while sampling", {"trainer": most.while_sampling(policy.offload), "engine": held}),
    )


def _weights(config: Config, spec: ModelSpec) -> float:
    """Bytes of the model on each GPU of an engine."""
    engine = config.rollout.engine
    element = _BYTES[spec.dtype if engine.dtype == "auto" else engine.dtype]
    return parameters(spec)[0] * element / engine.tensor_parallel_size


def least_of_engine(config: Config, spec: ModelSpec) -> float:
    """Bytes with which an engine can start: weights, keys and values of one longest sequence, what it keeps asleep."""
    engine = config.rollout.engine
    element = _BYTES[spec.dtype if engine.dtype == "auto" else engine.dtype]
    heads = max(1, spec.num_key_value_heads // engine.tensor_parallel_size)
    sequence = 2 * spec.num_layers * heads * spec.head_dim * element * engine.max_model_len
    return _weights(config, spec) + sequence + ASLEEP


def cheapest_changes(config: Config, job: Job, spec: ModelSpec, gpu_gib: float) -> list[tuple[str, float]]:
    """At most three changes and the fullest moment (bytes) after each.

    First those that suffice, by what they cost in speed; without three of them, those that save most.
    """
    before = GpuMemory.of(config, job, spec, gpu_gib).fullest.bytes
    tried = []
    for change in _changes(config, job, spec, gpu_gib):
        after = GpuMemory.of(_changed(config, change), job, spec, gpu_gib).fullest.bytes
        if after < before:
            tried.append((" ".join(f"{key}={value}".lower() for key, value in change.items()), after))
    enough = [item for item in tried if item[1] <= USABLE * gpu_gib * GIB]
    others = sorted((item for item in tried if item not in enough), key=lambda item: item[1])
    return [*enough, *others][:3]


def _changes(config: Config, job: Job, spec: ModelSpec, gpu_gib: float) -> Iterator[Mapping[str, object]]:
    """From those that cost nothing to those that cost most."""
    policy, engine = config.policy, config.rollout.engine
    replicas = Split.of(policy, job.world_size)
    if not policy.use_distributed_optimizer and replicas.data * replicas.context > 1:
        yield {"policy.use_distributed_optimizer": True}
    if policy.use_distributed_optimizer and policy.dtype == "bfloat16" and config.placement.mode == "colocated":
        yield from ({"policy.offload": what} for what in ("optimizer", "all") if policy.offload not in (what, "all"))
    smallest = least_of_engine(config, spec) / (gpu_gib * GIB)
    for share in (0.5, 0.4, 0.3):
        if smallest <= share < engine.gpu_memory_utilization:
            yield {"rollout.engine.gpu_memory_utilization": share}
    if policy.recompute != "full":
        yield {"policy.recompute": "full"}
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    if policy.micro_batch_tokens // 2 >= longest:
        yield {"policy.micro_batch_tokens": policy.micro_batch_tokens // 2}
    placed, more = Placement.of(config, job), 2 * engine.tensor_parallel_size
    if config.rollout.engines == "auto" and spec.num_attention_heads % more == 0 and len(placed.engines) % more == 0:
        yield {"rollout.engine.tensor_parallel_size": more}
    wider = 2 * policy.tensor_model_parallel_size
    if replicas.data % 2 == 0 and spec.num_key_value_heads % wider == 0:
        yield {"policy.tensor_model_parallel_size": wider, "policy.sequence_parallel": True}
    apart = config.placement.mode == "disaggregated" and len(placed.engines) <= len(placed.trainer)
    if apart and policy.use_distributed_optimizer and policy.dtype == "bfloat16":
        yield {"placement.mode": "colocated", "policy.offload": "all"}


def _changed(config: Config, change: Mapping[str, object]) -> Config:
    for key, value in change.items():
        config = _with(config, key.split("."), value)
    return config


def _with(section: T, path: list[str], value: object) -> T:
    """A copy of a section with the key at `path` below it changed."""
    name, *rest = path
    return section.model_copy(update={name: _with(getattr(section, name), rest, value) if rest else value})


def _named(gpus: range) -> str:
    """`GPU 3`, `GPUs 0 to 3`."""
    return f"GPU {gpus.start}" if len(gpus) == 1 else f"GPUs {gpus.start} to {gpus.stop - 1}"
