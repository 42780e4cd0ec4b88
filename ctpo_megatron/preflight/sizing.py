"""Writes the sizing table of docs/parallelism.md: `python -m ctpo_megatron.preflight.sizing [FILE]`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ctpo_megatron.config import GIB, GPU_GIB, Split, model_parameters, peak_memory, read_shapes, stage_parameters
from ctpo_megatron.models import ModelSpec

BEGIN = "<!-- sizing: begin (written by `python -m ctpo_megatron.preflight.sizing docs/parallelism.md`) -->"
END = "<!-- sizing: end -->"

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
    """The markdown table, one row a model and number of GPUs, and the arithmetic of each row below it."""
    lines = [
        "| model | GPUs | TP | PP | EP | DP | weights | gradients | optimizer | activations | head | **total, GiB** "
        f"| of {GPU_GIB} GiB | activations without recomputation |",
        "|---|" + "---:|" * 13,
    ]
    for row in SIZINGS:
        s, most = row.split, peak_memory(MODELS[row.model], row.split)
        cells = [row.model, row.gpus, s.tensor, s.pipeline, s.expert, s.data]
        parts = (most.weights, most.gradients, most.optimizer, most.activations, most.head)
        share = f"{most.total / (GPU_GIB * GIB):.0%}" + ("" if most.fits else ", **too much**")
        eager = peak_memory(MODELS[row.model], replace(s, recompute=())).activations
        cells += [*map(_gib, parts), f"**{_gib(most.total)}**", share, _gib(eager)]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines += [
        "",
        "The same as sums in GiB, for a rank of the fullest stage (P: its parameters, n: tokens of a micro-batch):",
        "",
    ]
    lines += [f"- {_arithmetic(row)}" for row in SIZINGS]
    return "\n".join(lines) + "\n"


def _arithmetic(row: Sizing) -> str:
    """One row of the table in words."""
    spec, s = MODELS[row.model], row.split
    most = peak_memory(spec, s)
    whole, active = model_parameters(spec)
    size = f"{whole / 1e9:.2f} B" + (f", {active / 1e9:.2f} B active" if spec.num_experts else "")
    dense, experts = (f"{count / 1e9:.3f} B" for count in stage_parameters(spec, s, most.stage))
    held = dense + (f" + {experts} of experts" if spec.num_experts else "")
    shards = f"12 P / {s.optimizer_shards}"
    if spec.num_experts:
        shards = f"12 x {dense} / {s.optimizer_shards} + 12 x {experts} / {s.expert_optimizer_shards}"
    return (
        f"{row.model} ({size}) on {row.gpus}: P = {held}; weights 2 P = {_gib(most.weights)}, "
        f"gradients 4 P = {_gib(most.gradients)}, optimizer {shards} = {_gib(most.optimizer)}, "
        f"activations {_gib(most.activations)} and head {_gib(most.head)} at n = {s.micro_batch_tokens:,}; "
        f"together {_gib(most.total)} GiB"
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"


def update(text: str) -> str:
    """A document with its sizing table replaced by the current one."""
    head, _, rest = text.partition(BEGIN)
    return f"{head}{BEGIN}\n{sizing()}{END}{rest.partition(END)[2]}"


def main() -> None:
    """Print the table, or rewrite it in place in the file named."""
    if len(sys.argv) == 1:
        print(sizing(), end="")
    else:
        file = Path(sys.argv[1])
        file.write_text(update(file.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
