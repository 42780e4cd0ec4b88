"""The sizing table of docs/reference/sizing.md, which `make reference` writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ctpo_megatron.config import GIB, GPU_GIB, Split, head_chunk_rows, peak_memory, read_shapes, stage_parameters
from ctpo_megatron.models import ModelSpec

_COMMON = Split(distributed_optimizer=True, recompute=("full",), micro_batch_tokens=16384)


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


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"
