"""What both sides of `benchmarks.trl` do, at two sizes, and where they start from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import runs
from ctpo_megatron.config import load_config
from examples.toolmath import Task, TinyModel, write_task


@dataclass(frozen=True)
class Size:
    """What both sides do. warm: steps that are not counted; trial_steps: those that
    choose the number of threads; pieces: micro-batches of TRL's optimizer step."""

    name: str
    about: str
    prompts: int
    updates: int
    warm: int
    trial_steps: int
    steps: int
    pieces: int
    lr: float
    max_turns: int
    max_turn_tokens: int
    max_response_tokens: int
    coin: bool = False
    settings: tuple[str, ...] = ()
    samples_per_prompt: int = 8
    goals: Mapping[str, float] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        """Of a step."""
        return self.prompts * self.samples_per_prompt


@dataclass(frozen=True)
class Way:
    """How a side is run. threads: of the trainer and of the engine, each, unless that has `engine_threads`; config:
    fields of TRL's GRPOConfig."""

    threads: int
    config: Mapping[str, Any] = field(default_factory=dict)
    engine_threads: int | None = None

    @classmethod
    def of(cls, text: str) -> Way:
        """`TRAINER` or `TRAINER:ENGINE`. Raises ValueError."""
        trainer, _, engine = text.partition(":")
        return cls(int(trainer), engine_threads=int(engine) if engine else None)

    def __str__(self) -> str:
        rest = "".join(f", {key}={value}" for key, value in self.config.items())
        engine = "" if self.engine_threads is None else f", engine {self.engine_threads}"
        return f"{self.threads} thread{'s' if self.threads > 1 else ''}{engine}{rest}"


MEDIUM_MODEL: dict[str, Any] = {
    "hidden_size": 512,
    "num_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 1536,
    "max_position_embeddings": 2048,
    "rope_theta": 10_000.0,
    "initializer_range": 0.02,
}
MEDIUM = Size(
    "medium",
    "A random Qwen3 of hidden size 512 and 8 layers (25 million parameters), 4 prompts x 8 samples, one optimizer step "
    "a batch. A sample ends with the probability of one token of 512, so that lengths are geometric, at most 1,000.",
    prompts=4,
    updates=1,
    warm=0,
    trial_steps=1,
    steps=1,
    pieces=8,
    lr=1e-6,
    max_turns=1,
    max_turn_tokens=1000,
    max_response_tokens=1000,
    coin=True,
    settings=(
        "policy.micro_batch_tokens=4096",
        "rollout.engine.max_model_len=1088",
        "rollout.engine.max_num_seqs=32",
        "rollout.engine.kv_cache_mb=640",
        "reward.function=benchmarks.coin:coin",
        f'extensions.path=["{runs.ROOT}"]',
    ),
    goals={"samples": 1.3},
)
QUICKSTART = Size(
    "quickstart",
    "The quickstart's model (0.3 million parameters) after its supervised stage, 32 prompts x 8 samples with tool "
    "calls, 8 optimizer steps a batch.",
    prompts=32,
    updates=8,
    warm=1,
    trial_steps=1,
    steps=4,
    pieces=1,
    lr=3e-4,
    max_turns=4,
    max_turn_tokens=64,
    max_response_tokens=176,
    goals={"samples": 1.5, "cpu_per_1000": 0.8},
)
SIZES = {size.name: size for size in (QUICKSTART, MEDIUM)}


def start_of(size: Size, cache: Path) -> tuple[Path, Path]:
    """Model and prompts that both sides start from."""
    if size.name == QUICKSTART.name:
        return runs.start_weights(cache)
    task = cache / "medium"
    model = TinyModel(**MEDIUM_MODEL)
    write_task(Task(train_prompts=64, heldout_prompts=8, sft_conversations=640, model=model), task)
    return task / "model", task / "train.parquet"


def our_settings(size: Size, start: tuple[Path, Path], way: Way, steps: int, folder: Path) -> list[str]:
    """The quickstart's settings that differ here."""
    return [
        *runs.RL_ONLY,
        f"run.root={folder}",
        "run.name=ours",
        f"run.steps={steps}",
        f"model.path={start[0]}",
        f'data.train=["{start[1]}"]',
        f"policy.threads={way.threads}",
        f"policy.mini_batch_prompts={size.prompts // size.updates}",
        f"policy.optimizer.lr={size.lr}",
        f"rollout.engine.threads={way.engine_threads or way.threads}",
        f"rollout.prompts_per_step={size.prompts}",
        f"rollout.samples_per_prompt={size.samples_per_prompt}",
        f"rollout.max_turns={size.max_turns}",
        f"rollout.max_turn_tokens={size.max_turn_tokens}",
        f"rollout.max_response_tokens={size.max_response_tokens}",
        *size.settings,
    ]


def trl_options(size: Size, start: tuple[Path, Path], way: Way, steps: int, url: str, marks: Path) -> dict[str, Any]:
    """What `benchmarks/trl_side.py` is told."""
    names = ("samples", "updates", "pieces", "samples_per_prompt", "lr", "coin")
    limits = ("max_turns", "max_turn_tokens", "max_response_tokens")
    return {name: getattr(size, name) for name in (*names, *limits)} | {
        "model": str(start[0]),
        "data": str(start[1]),
        "threads": way.threads,
        "steps": steps,
        "sandbox": url,
        "config": way.config,
        "run_timeout_s": load_config(runs.CONFIG).sandbox.run_timeout_s,
        "marks": str(marks),
    }
