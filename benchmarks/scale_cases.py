"""The jobs that `benchmarks.scale` simulates, and what it assumes of a machine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.simulated_engines import Speed
from ctpo_megatron.models import FAMILIES, ModelSpec

LENGTHS = Path(__file__).with_name("scale_lengths.json")
SAMPLES, LONGEST = 8, 16_000
STEPS_OF_EPOCH = 2
"""After an epoch the scheduler knows a length of every prompt."""


@dataclass(frozen=True)
class Machine:
    """What is assumed of one GPU and of Ray; none of it was measured on a GPU.

    flops, bytes_s: dense bfloat16 FLOP/s and memory bytes/s of an H100 (its data sheet). mfu: of the trainer's passes.
    decode: share of the bytes/s that decoding reaches. prefill: MFU of prefill. cache_bytes: of keys and values.
    weights_bytes_s: one update, all engines at once. start_s: a new engine. ray_get_s: of the driver, for a group's
    answer. score_s: until a group is scored.
    """

    flops: float = 989e12
    bytes_s: float = 3.35e12
    mfu: float = 0.3
    decode: float = 0.5
    prefill: float = 0.4
    launch_s: float = 0.004
    cache_bytes: float = 55e9
    weights_bytes_s: float = 10e9
    start_s: float = 60.0
    ray_get_s: float = 0.0005
    score_s: float = 0.05

    def speed(self, model: ModelSpec) -> Speed:
        """Of an engine of one GPU."""
        parameters = parameter_count(model)
        cached = 2 * model.num_layers * model.num_key_value_heads * model.head_dim * 2
        return Speed(
            step_s=self.launch_s + 2 * parameters / (self.decode * self.bytes_s),
            token_s=cached / (self.decode * self.bytes_s),
            prefill_token_s=2 * parameters / (self.prefill * self.flops),
            update_s=2 * parameters / self.weights_bytes_s,
            cache_tokens=self.cache_bytes / cached,
            start_s=self.start_s,
        )

    def train_s(self, model: ModelSpec, tokens: int, gpus: int) -> float:
        """Old log-probs and updates: four forward passes' worth of FLOPs, without attention's own."""
        return 8 * parameter_count(model) * tokens / (gpus * self.mfu * self.flops)


QWEN3 = FAMILIES["Qwen3ForCausalLM"]
SMALL = ModelSpec(QWEN3, 28, 1024, 16, 8, 128, 3072, 40960, 151_936)
LARGE = ModelSpec(QWEN3, 36, 2560, 32, 8, 128, 9728, 40960, 151_936)


def parameter_count(model: ModelSpec) -> int:
    """Of a tied Qwen3."""
    attention = 2 * model.hidden_size * model.head_dim * (model.num_attention_heads + model.num_key_value_heads)
    layer = attention + 3 * model.hidden_size * model.intermediate_size
    return model.num_layers * layer + model.vocab_size * model.hidden_size


@dataclass(frozen=True)
class Size:
    """A job. prompts: of a step. trainers: its GPUs that train; all of them: engines take turns with the trainer."""

    gpus: int
    model: str
    prompts: int
    trainers: int

    @property
    def shared(self) -> bool:
        return self.trainers == self.gpus

    @property
    def engines(self) -> int:
        return self.gpus if self.shared else self.gpus - self.trainers

    @property
    def spec(self) -> ModelSpec:
        return {"0.6B": SMALL, "4B": LARGE}[self.model]


SIZES = {1: Size(1, "0.6B", 32, 1), 8: Size(8, "4B", 128, 2), 64: Size(64, "4B", 512, 16)}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "order of the data": {"order": "data"},
    "oversample 1/8": {"oversample": 1 / 8},
    "max_staleness 1": {"max_staleness": 1},
    "max_staleness 1, partial finish": {"max_staleness": 1, "partial": "finish"},
    "max_staleness 2": {"max_staleness": 2},
    "max_staleness 4": {"max_staleness": 4},
}


@dataclass(frozen=True)
class Case:
    """What one process simulates.

    trainers: GPUs of the job that train; 0: as its `Size` says. seats: `rollout.engine.max_num_seqs`. steps: counted
    ones, which come after an epoch and after as many steps as are sampled ahead.
    """

    gpus: int
    variant: str
    tokens: float
    longest: int = LONGEST
    deaths_per_hour: float = 0.0
    trainers: int = 0
    seats: int = 256
    steps: int = 4
    lengths: str = LENGTHS.name

    @property
    def size(self) -> Size:
        size = SIZES[self.gpus]
        return replace(size, trainers=self.trainers or size.trainers)

    @property
    def before(self) -> int:
        """Steps that are not counted."""
        ahead: int = VARIANTS[self.variant].get("max_staleness", 0)
        return min(self.steps, STEPS_OF_EPOCH) + ahead
