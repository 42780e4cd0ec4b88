"""How long a step and a run would take on GPUs, as a range: arithmetic from stated speeds, never measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ctpo_megatron.config import ELEMENT_BYTES, Config, cache_bytes, engine_count, model_parameters
from ctpo_megatron.models import ModelSpec
from ctpo_megatron.preflight.disk import EXPECTED_SHARE, expected_tokens
from ctpo_megatron.preflight.plan import TableRow

DURATION_TITLE = "Time on CUDA: arithmetic, never measured"
MFU = (0.2, 0.4)
BANDWIDTH = (0.3, 0.6)
"""Share of the memory's bandwidth that decoding reaches."""
_PASSES = 3
"""Of an update: the backward pass needs the FLOPs of two."""
_STEP = 0.004
"""Seconds of a decoding step, besides reading weights and cache."""

Range = tuple[float, float]
"""Two ends: of times the fastest first, of speeds the slowest."""


@dataclass(frozen=True)
class Card:
    """A GPU. gib: memory that its driver shows. tflops: dense bfloat16 peak. bandwidth: TB/s of its memory."""

    gib: float
    tflops: float
    bandwidth: float


# NVIDIA's data sheets of the L4, the A100 80GB SXM, the H100 SXM and the H200 SXM. They give most peaks with sparsity,
# which is twice the dense one: 242 TFLOP/s of the L4, 1,979 of the H100 and the H200.
CARDS = {
    "l4": Card(22.5, 121.0, 0.3),
    "a100": Card(80, 312.0, 2.039),
    "h100": Card(80, 989.0, 3.35),
    "h200": Card(140, 989.0, 4.8),
}
USUAL_CARD = "h100"


@dataclass(frozen=True)
class Speeds:
    """What the range follows from. mfu: worst and best of the trainer's passes. peak_tflops: dense, of one GPU.

    decode: tokens/s of one engine, worst and best; None: from the bytes that a decoding step reads. bandwidth: TB/s of
    the memory of one GPU.
    """

    mfu: Range = MFU
    decode: Range | None = None
    peak_tflops: float = CARDS[USUAL_CARD].tflops
    bandwidth: float = CARDS[USUAL_CARD].bandwidth


def duration_table(config: Config, spec: ModelSpec, ranks: int, speeds: Speeds) -> list[TableRow]:
    """Rows (what, range, how it follows) of one RL step and of the run, without evaluations and checkpoints."""
    rollout = config.rollout
    count, engines = rollout.prompts_per_step * rollout.samples_per_prompt, engine_count(config)
    tokens, response = round(expected_tokens(config)), EXPECTED_SHARE * rollout.max_response_tokens
    passes = _PASSES + 1  # one more for old log-probs
    flops = count * passes * spec.forward_flops(tokens, round(response))
    train = _range(flops / (ranks * speeds.peak_tflops * 1e12), speeds.mfu)
    rates, why = _decoding(config, spec, count / engines, tokens, speeds)
    sample = _range(count * response / engines, rates) if rollout.replay is None else (0.0, 0.0)
    ahead = rollout.max_staleness > 0
    step = tuple(max(pair) if ahead else sum(pair) for pair in zip(train, sample, strict=True))
    reached = f"{_percent(speeds.mfu)} MFU of {speeds.peak_tflops:g} TFLOP/s"
    many = f"{count:,} trajectories x {tokens:,} tokens"
    sampling = ("sampling", _text(sample), f"{engines} engines, {why}; without the tail of the longest answers")
    return [
        ("training", _text(train), f"{many}, {passes} passes, {ranks} GPUs at {reached}"),
        *([sampling] if rollout.replay is None else []),
        ("a step", _text(step), "the longer of both (max_staleness > 0)" if ahead else "one after the other"),
        ("the run", _text([seconds * config.run.steps for seconds in step]), f"{config.run.steps} steps"),
    ]


def _decoding(config: Config, spec: ModelSpec, waiting: float, tokens: int, speeds: Speeds) -> tuple[Range, str]:
    """Tokens/s of an engine, worst and best."""
    if speeds.decode is not None:
        return speeds.decode, f"{speeds.decode[0]:,.0f} to {speeds.decode[1]:,.0f} tokens/s each"
    engine = config.rollout.engine
    batch = max(1.0, min(waiting, engine.max_num_seqs))
    weights = model_parameters(spec)[0] * ELEMENT_BYTES[config.engine_dtype] / engine.tensor_parallel_size
    read = weights + batch * cache_bytes(config, spec) * tokens / 2  # of a sequence half of its tokens, on average
    slow, fast = (batch / (_STEP + read / (share * speeds.bandwidth * 1e12)) for share in BANDWIDTH)
    reached = f"{_percent(BANDWIDTH)} of {speeds.bandwidth:g} TB/s"
    return (slow, fast), f"{slow:,.0f} to {fast:,.0f} tokens/s each: {batch:.0f} sequences, {reached}"


def _range(work: float, speeds: Range) -> Range:
    slow, fast = speeds
    return work / fast, work / slow


def _percent(shares: Range) -> str:
    return f"{shares[0]:.0%} to {shares[1]:.0%}"


def _text(seconds: Sequence[float]) -> str:
    fast, slow = seconds
    size, unit = next((size, unit) for size, unit in ((3600.0, "h"), (60.0, "min"), (0.0, "s")) if slow >= 2 * size)
    return f"{fast / (size or 1):.3g} to {slow / (size or 1):.3g} {unit}"
