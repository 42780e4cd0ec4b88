"""The tables of docs/reference/sizing.md, which `make reference` writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ctpo_megatron.config import (
    Job,
    load_config,
    read_shapes,
)
from ctpo_megatron.models import ModelSpec
from ctpo_megatron.plan import (
    GIB,
    GPU_GIB,
    Candidate,
    GpuMemory,
    Split,
    choices,
    head_chunk_rows,
    peak_memory,
    stage_parameters,
)

_COMMON = Split(distributed_optimizer=True, recompute=("full",), micro_batch_tokens=16384, shared_prefixes=True)


@dataclass(frozen=True)
class Sizing:
    """A model on a number of GPUs, cut as recommended."""

    model: str
    gpus: int
    split: Split


MODELS: Mapping[str, ModelSpec] = {
    name: read_shapes(f"models/{name.lower().replace('-', '_')}.json")
    for name in ("Qwen3-4B", "Qwen3-14B", "Qwen3-32B", "Qwen3-30B-A3B")
}
"""Shapes of the published config.json files."""


def _sizings() -> tuple[Sizing, ...]:
    def cut(model: str, gpus: int, tensor: int = 1, pipeline: int = 1, expert: int = 1) -> Sizing:
        split = replace(
            _COMMON,
            tensor=tensor,
            pipeline=pipeline,
            expert=expert,
            data=gpus // (tensor * pipeline),
            sequence_parallel=tensor > 1,
        )
        return Sizing(model, gpus, split)

    return (
        *(cut("Qwen3-4B", gpus) for gpus in (8, 16, 64)),
        *(cut("Qwen3-14B", gpus, tensor=4) for gpus in (8, 16, 64)),
        *(cut("Qwen3-32B", gpus, tensor=8) for gpus in (8, 16)),
        cut("Qwen3-32B", 64, tensor=4, pipeline=2),
        cut("Qwen3-30B-A3B", 8, tensor=4, expert=2),
        cut("Qwen3-30B-A3B", 8, tensor=2, pipeline=2, expert=2),
        *(cut("Qwen3-30B-A3B", gpus, pipeline=2, expert=8) for gpus in (16, 64)),
    )


SIZINGS = _sizings()


def sizing() -> str:
    """The markdown table, one row a model and number of GPUs."""
    lines = [
        "| model | GPUs | TP | PP | EP | DP | P, billion | weights | gradients | optimizer | activations | head | kept "
        f"| **total, GiB** | of {GPU_GIB} GiB | activations without recomputation |",
        "|---|" + "---:|" * 15,
    ]
    for row in SIZINGS:
        spec, s = MODELS[row.model], row.split
        s = replace(s, head_chunk_tokens=head_chunk_rows(spec, s, GPU_GIB * GIB))
        most = peak_memory(spec, s)
        dense, experts = (f"{count / 1e9:.3f}" for count in stage_parameters(spec, s, most.stage))
        held = dense + (f" + {experts} of experts" if spec.num_experts else "")
        cells = [row.model, row.gpus, s.tensor, s.pipeline, s.expert, s.data, held]
        parts = (most.weights, most.gradients, most.optimizer, most.activations, most.head, most.kept)
        share = f"{most.total / (GPU_GIB * GIB):.0%}" + ("" if most.fits() else ", **too much**")
        eager = peak_memory(spec, replace(s, recompute=())).activations
        cells += [*map(_gib, parts), f"**{_gib(most.total)}**", share, _gib(eager)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def chosen() -> str:
    """The markdown table of what `auto` is in the recipes for one GPU, one row a recipe and size of the GPU."""
    lines = [
        "| recipe, GPU | micro-batch, tokens | recompute | GiB in an update | s a step | with other recomputation |",
        "|---|---:|---|---:|---:|---|",
    ]
    for model in ("0.6B", "1.7B"):
        name = f"qwen3_{model.lower().replace('.', '_')}"
        config, spec = load_config(f"{name}_one_gpu.yaml"), read_shapes(f"models/{name}.json")
        for gpu_gib in (24, 48, 80, 141):
            best, other = choices(GpuMemory(config, Job(1, 1), spec, gpu_gib))
            assert other is not None  # both may be chosen
            row = [f"Qwen3-{model}, {gpu_gib} GiB", f"{best.micro_batch_tokens:,}", best.recompute, _much(best)]
            instead = f"{other.micro_batch_tokens:,} tokens, {_much(other, ' GiB')}, {other.seconds:.2g} s"
            lines.append("| " + " | ".join([*row, f"{best.seconds:.2g}", instead]) + " |")
    return "\n".join(lines) + "\n"


def _much(choice: Candidate, unit: str = "") -> str:
    return f"{_gib(choice.bytes)}{unit}{'' if choice.fits else ', **too much**'}"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"
