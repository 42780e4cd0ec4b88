"""What `policy.micro_batch_tokens: auto` and `policy.recompute: auto` are on a GPU: the quickest step that fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ctpo_megatron.config import (
    Chosen,
    Config,
    ConfigError,
    Job,
    Problem,
    Recompute,
    check_tokens,
    failed,
    sequence_multiple,
)
from ctpo_megatron.models import ModelSpec
from ctpo_megatron.plan.disk import EXPECTED_SHARE, expected_tokens
from ctpo_megatron.plan.gpus import GpuMemory, check_gpu_memory
from ctpo_megatron.plan.memory import Split, TableRow, gib

STEP, MOST = 1024, 65_536
"""Micro-batches are multiples of STEP tokens. By the speeds below Qwen3-0.6B gains nothing beyond 29,000 tokens, and
larger models nothing beyond fewer; MOST leaves room for slower hosts."""
FORWARD_MS, BACKWARD_MS = 3, 5
"""Of the host, to launch a layer of a micro-batch. An H100 with local layers took 2.9 ms for a layer's pass of old
log-probs and 7.8 to 10.9 ms for its update, full recomputation included (benchmarks/results/gpu/nvidia-h100.md)."""
FLOPS = 0.4 * 989e12
"""FLOP/s of the trainer's matrix products: 40 % of an H100's peak, an assumption."""


@dataclass(frozen=True)
class Candidate:
    """seconds: of an optimizer step. bytes: of each of the trainer's GPUs in an update, of which `usable` may be taken.

    seconds is the longer of two: what the host takes to launch all layers of all micro-batches, and what a GPU takes
    for its products. `recompute: full` adds a forward pass to both. Pipeline stages wait (PP - 1) / (VPP x m) of the
    time of m micro-batches. Sequences have the expected length (`disk.expected_tokens`). The speeds are an H100's for
    every card, so that what is chosen follows from its memory alone. Communication does not depend on the choice.
    """

    micro_batch_tokens: int
    recompute: Recompute
    seconds: float
    bytes: float
    usable: float

    @property
    def fits(self) -> bool:
        return self.bytes <= self.usable

    @property
    def text(self) -> str:
        return f"{self.micro_batch_tokens:,} tokens, recompute: {self.recompute}"

    @property
    def cost(self) -> str:
        much = "" if self.fits else "TOO MUCH: "
        return f"{much}{gib(self.bytes)} of {gib(self.usable)} in an update, about {self.seconds:.2g} s a step"

    @property
    def _order(self) -> tuple[bool, float, bool, int]:
        """First what fits, then what is quick, then less recomputation and larger micro-batches; the least of what does
        not fit."""
        if not self.fits:
            return True, self.bytes, False, 0
        return False, self.seconds, self.recompute == "full", -self.micro_batch_tokens


def choices(memory: GpuMemory) -> tuple[Candidate, Candidate | None]:
    """Return the choice for the configuration of `memory`, and the best one with other recomputation; where that is
    given, the next smaller micro-batch. None: there is no other.
    """
    tried = sorted(_candidates(memory), key=lambda choice: choice._order)
    best = tried[0]
    if memory.config.policy.recompute == "auto":
        others = [choice for choice in tried if choice.recompute != best.recompute]
    else:
        others = [choice for choice in tried if choice.micro_batch_tokens < best.micro_batch_tokens]
        others.sort(key=lambda choice: -choice.micro_batch_tokens)
    return best, next(iter(others), None)


def settled(config: Config, job: Job, spec: ModelSpec, gpu_gib: float) -> Config:
    """Return the configuration with `auto` of the policy chosen for GPUs of that size.

    Where nothing fits, it is the least: `check_gpu_memory` says so.
    """
    if not _is_auto(config):
        return config
    best, _ = choices(GpuMemory(config, job, spec, gpu_gib))
    return _with(config, Chosen(best.micro_batch_tokens, best.recompute, round(gpu_gib, 1)))


def settled_as_before(config: Config, job: Job, spec: ModelSpec, gpu_gib: float, before: Chosen | None) -> Config:
    """As `settled`, for a run that starts. before: what was chosen when it was begun; None: it begins now.

    Raises ConfigError where nothing fits, or not what was chosen before: another choice would round differently.
    """
    if not _is_auto(config):
        return config
    chosen = settled(config, job, spec, gpu_gib)
    kept = chosen if before is None else _with(config, before)
    memory = GpuMemory(kept, job, spec, gpu_gib)
    if memory.update.bytes <= memory.usable:
        problems = failed(check_tokens(kept, spec, job))
    elif before is None:
        problems = [*check_gpu_memory(kept, spec, job, gpu_gib)]
    else:
        problems = [_too_much(memory, before, chosen.policy.chosen)]
    if problems:
        raise ConfigError(problems)
    return kept


def choice_table(config: Config, job: Job, spec: ModelSpec, gpu_gib: float) -> list[TableRow]:
    """Rows (which, what, at which cost) of the choice and the runner-up; empty where both numbers are given."""
    if not _is_auto(config):
        return []
    chosen = zip(("chosen", "runner-up"), choices(GpuMemory(config, job, spec, gpu_gib)), strict=True)
    return [(which, choice.text, choice.cost) for which, choice in chosen if choice is not None]


def _is_auto(config: Config) -> bool:
    return "auto" in (config.policy.micro_batch_tokens, config.policy.recompute)


def _with(config: Config, chosen: Chosen) -> Config:
    return config.model_copy(update={"policy": config.policy.with_auto(chosen)})


def _too_much(memory: GpuMemory, before: Chosen, now: Chosen) -> Problem:
    """The numbers of a resumed run do not fit. now: what would be chosen."""
    message = (
        f"was {before.micro_batch_tokens:,} with recompute: {before.recompute} when the run was begun on GPUs of "
        f"{before.gpu_gib:g} GiB; that takes {gib(memory.update.bytes)} in an update, and of the {memory.gpu_gib:.1f} "
        f"GiB of these GPUs {gib(memory.usable)} can be used"
    )
    here = f"policy.micro_batch_tokens={now.micro_batch_tokens} policy.recompute={now.recompute}"
    fix = f"resume on larger GPUs, or type {here}: what follows rounds differently"
    return Problem("policy.micro_batch_tokens", message, fix, "auto")


def _candidates(memory: GpuMemory) -> Iterator[Candidate]:
    """All micro-batches from the longest sequence to a pipeline stage's part of a mini-batch of longest ones."""
    config, policy = memory.config, memory.config.policy
    split = Split.of(policy, memory.job.world_size)
    multiple = sequence_multiple(policy)
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    longest = -(-longest // multiple) * multiple
    least = -(-longest // (split.context * STEP)) * STEP
    sequences = policy.mini_batch_prompts * config.rollout.samples_per_prompt / split.data
    most = int(min(MOST, sequences * longest / (split.context * split.pipeline))) // STEP * STEP
    sizes = (
        range(least, max(least, most) + 1, STEP)
        if policy.micro_batch_tokens == "auto"
        else [policy.chosen.micro_batch_tokens]
    )
    length, layers = expected_tokens(config), memory.spec.num_layers / split.pipeline
    of_responses = round(EXPECTED_SHARE * config.rollout.max_response_tokens)
    forward = sequences * memory.spec.forward_flops(round(length), of_responses)
    speed = split.tensor * split.context * split.pipeline * FLOPS
    kinds: tuple[Recompute, ...] = ("none", "full") if policy.recompute == "auto" else (policy.recompute,)
    for recompute in kinds:
        for tokens in sizes:
            there, again = replace(memory, config=_with(config, Chosen(tokens, recompute))), recompute == "full"
            micro_batches = max(1.0, sequences * length / (split.context * tokens))
            host = micro_batches * layers * (FORWARD_MS * (1 + again) + BACKWARD_MS) / 1000
            waiting = (split.pipeline - 1) / (split.chunks * micro_batches)
            seconds = max(host, forward * (3 + again) / speed) * (1 + waiting)
            yield Candidate(tokens, recompute, seconds, there.update.bytes, memory.usable)
