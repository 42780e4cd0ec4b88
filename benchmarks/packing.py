"""Packed against padded training steps on the quickstart's length mix, in one process, in turns.

    PYTHONPATH=.:kernels python -m benchmarks.packing [--rounds 7] [--threads 1] [--quick] [--out benchmarks/results]

Both sides are the same Policy: weights, loss, streaming head, optimizer. The padded side runs each micro-batch as a
dense [sequences, longest] batch: no cu_seqlens, rotary embedding and attention (SDPA, is_causal) on the dense batch, a
fixed number of sequences per micro-batch as a trainer without packing has it. Both give the same gradients, which is
checked before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.kernels import report
from ctpo_megatron.config import Config, load_config
from ctpo_megatron.data import Trajectory
from ctpo_megatron.objective import objective_from_config
from ctpo_megatron.policy import MiniBatch, Trainer, destroy_distributed, init_distributed, policy_gradient
from examples.toolmath import TinyModel

HERE = Path(__file__).parent
LENGTHS = HERE / "packing_lengths.json"
QUICKSTART = HERE.parent / "configs" / "quickstart.yaml"
GOAL = 1.5
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Side:
    """One way to lay out an optimizer step. rows: sequences per padded micro-batch; None: packed.

    length: tokens that each sequence is padded to; None: the longest of its micro-batch.
    """

    name: str
    rows: int | None = None
    length: int | None = None


def recorded(vocab_size: int, steps: dict[str, list[list[int]]]) -> list[list[Trajectory]]:
    """Trajectories of the recorded lengths with random tokens, one list per RL step."""
    generator = torch.Generator().manual_seed(0)
    result = []
    for rows in steps.values():
        batch = []
        for index, runs in enumerate(rows):
            trajectory = Trajectory(f"p{index // 8}", index % 8, seed=index)
            for turn, length in enumerate(runs):
                ids = torch.randint(vocab_size, (length,), generator=generator).tolist()
                if turn % 2:
                    trajectory.append_model(ids, [-6.0] * length, [0] * length, turn)
                else:
                    trajectory.append_context(ids, turn)
            batch.append(trajectory)
        result.append(batch)
    return result


def padded_to(trajectory: Trajectory, length: int) -> Trajectory:
    """A copy with masked tokens behind it."""
    copy = deepcopy(trajectory)
    if len(copy) < length:
        copy.append_context([0] * (length - len(copy)), turn=0)
    return copy


class Bench:
    """The policy, and an optimizer step of it on either side."""

    def __init__(self, config: Config, directory: Path, vocab_size: int) -> None:
        self.config = config
        shape = TinyModel()
        settings = shape.model_dump(exclude={"num_layers", "rope_theta"})
        torch.manual_seed(0)
        Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=vocab_size,
                num_hidden_layers=shape.num_layers,
                rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
                **settings,
            )
        ).save_pretrained(directory)
        layout = init_distributed(config.policy, seed=0)
        self.policy = Trainer(config.policy, layout, directory, temperature=config.rollout.temperature)
        self.policy.use_optimizer(config.policy.optimizer, 10**6)
        self.loss = policy_gradient(objective_from_config(config.objective), config.objective.anchor)
        self.size = config.policy.mini_batch_prompts * config.rollout.samples_per_prompt

    def lay_out(self, side: Side, trajectories: list[Trajectory]) -> list[MiniBatch]:
        """The optimizer steps of one RL step."""
        advantages = [(-1.0, 0.5, 0.2, 1.3)[i % 4] for i in range(len(trajectories))]
        packed = self.policy.distribute(trajectories, advantages, self.size)
        if side.rows is None:
            return packed
        padded: list[Any] = []
        for start in range(0, len(trajectories), side.rows):
            rows = trajectories[start : start + side.rows]
            length = side.length or max(map(len, rows))
            filled = [padded_to(t, length) for t in rows]
            (dense,) = self.policy.distribute(filled, advantages[start : start + side.rows], side.rows)
            padded += dense.micro_batches
        each = self.size // side.rows
        return [replace(mini, micro_batches=padded[i * each : (i + 1) * each]) for i, mini in enumerate(packed)]

    @contextmanager
    def layout_of(self, side: Side) -> Iterator[None]:
        """The model takes dense batches inside of this block if the side is padded."""
        if side.rows is None:
            yield
            return
        (gpt,) = self.policy._model.gpt
        cores = [layer.self_attention.core_attention for layer in gpt.decoder.layers]
        gpt.forward = partial(_dense_forward, gpt.forward)
        for core in cores:
            core.forward = partial(_dense_attention, core.softmax_scale)
        try:
            yield
        finally:
            for module in (gpt, *cores):
                del module.forward  # the class's own again

    def gradients(self, side: Side, trajectories: list[Trajectory]) -> dict[str, torch.Tensor]:
        """Gradient of the first optimizer step."""
        with self.layout_of(side):
            first, *_ = self.lay_out(side, trajectories)
            self.policy.compute_old_log_probs([first])
            _, found = self.policy.gradients(first, self.loss)
            return {name: tensor.clone() for name, tensor in found}

    def measure(self, side: Side, trajectories: list[Trajectory]) -> dict[str, float]:
        """CPU and wall seconds of anchor pass and optimizer steps of one RL step; packing apart."""
        with self.layout_of(side):
            packing, mini_batches = _timed(lambda: self.lay_out(side, trajectories))
            anchor, _ = _timed(lambda: self.policy.compute_old_log_probs(mini_batches))
            update, _ = _timed(lambda: [self.policy.update(mini, self.loss) for mini in mini_batches])
        found = {
            f"{name}_{clock}": value
            for name, spent in (("anchor", anchor), ("update", update))
            for clock, value in spent.items()
        }
        if side.rows is None:
            found |= {f"packing_{clock}": value for clock, value in packing.items()}
        micro_batches = [micro for mini in mini_batches for micro in mini.micro_batches]
        found["useful"] = sum(map(len, trajectories)) / sum(micro.num_tokens for micro in micro_batches)
        found["micro_batches"] = len(micro_batches) / len(mini_batches)
        return found


def _timed(action: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    cpu, wall = time.process_time(), time.perf_counter()
    result = action()
    return {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}, result


def _dense_forward(
    forward: Callable[..., torch.Tensor],
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    attention_mask: None,
    packed_seq_params: Any,
    **options: Any,
) -> torch.Tensor:
    """Sequences of equal length end to end -> the model on a dense batch -> its output end to end."""
    length = packed_seq_params.max_seqlen_q
    output = forward(input_ids.view(-1, length), position_ids.view(-1, length), attention_mask, **options)
    return output.flatten(0, 1)[None]


def _dense_attention(
    scale: float | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor:
    """Causal attention of a dense batch: query `[s, b, h, d]`, key and value `[s, b, g, d]` -> `[s, b, h * d]`."""
    q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out.permute(2, 0, 1, 3).flatten(2)


def agreement(bench: Bench, sides: list[Side], trajectories: list[Trajectory]) -> float:
    """Largest relative difference of a padded side's gradient from the packed; RuntimeError above the tolerance."""
    expected = bench.gradients(sides[0], trajectories)
    size = sum(float(t.double().square().sum()) for t in expected.values()) ** 0.5
    worst = 0.0
    for side in sides[1:]:
        found = bench.gradients(side, trajectories)
        apart = sum(float((found[n].double() - t.double()).square().sum()) for n, t in expected.items()) ** 0.5
        worst = max(worst, apart / size)
        if not apart <= TOLERANCE * size:
            raise RuntimeError(f"{side.name}: the gradient is off by {apart / size:.1e}")
    return worst


def run(rounds: int, threads: int, quick: bool = False) -> dict[str, Any]:
    """Medians over rounds of all sides in alternating order, and ratios of one round to the packed side.

    quick: one optimizer step instead of three RL steps, to see that it works.
    """
    environment = report.environment("cpu", threads)
    config = load_config(QUICKSTART, [f"policy.threads={threads}"])
    lengths = json.loads(LENGTHS.read_text(encoding="utf-8"))
    batches = recorded(lengths["vocab_size"], lengths["steps"])
    if quick:
        batches = [batches[0][: config.policy.mini_batch_prompts * config.rollout.samples_per_prompt]]
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    fits = config.policy.micro_batch_tokens // longest
    size = config.policy.mini_batch_prompts * config.rollout.samples_per_prompt
    most = max(rows for rows in (1, 2, 4, 8, 16, 32, 64) if rows <= min(fits, size))
    sides = [Side("packed"), Side(f"padded, {most} sequences", most)]
    sides += [Side(f"padded, {rows} sequences", rows) for rows in (most // 2, most // 4)]
    sides.append(Side(f"padded to {longest} tokens, {most} sequences", most, longest))
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(config, Path(folder), lengths["vocab_size"])
        try:
            apart = agreement(bench, sides, batches[0])
            for side in sides:
                bench.measure(side, batches[0])
            samples: dict[str, list[dict[str, float]]] = {side.name: [] for side in sides}
            for number in range(rounds):
                for batch in batches:
                    for side in sides if number % 2 else reversed(sides):
                        samples[side.name].append(bench.measure(side, batch))
        finally:
            destroy_distributed()
    rows = [_row(name, found, samples["packed"]) for name, found in samples.items()]
    return {
        "environment": environment,
        "rounds": rounds,
        "steps": len(batches),
        "agreement": apart,
        "most": most,
        "longest": longest,
        "rows": rows,
    }


def _row(name: str, found: list[dict[str, float]], packed: list[dict[str, float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"side": name}
    row |= {key: statistics.median(sample[key] for sample in found) for key in found[0]}
    for phase in ("anchor", "update"):
        for clock in ("cpu_s", "wall_s"):
            key = f"{phase}_{clock}"
            # The packed side pays for its packing.
            ratios = [
                theirs[key] / (ours[key] + (ours[f"packing_{clock}"] if phase == "update" else 0.0))
                for theirs, ours in zip(found, packed, strict=True)
            ]
            row[f"{key}_ratio"] = statistics.median(ratios)
            row[f"{key}_range"] = (min(ratios), max(ratios))
    return row


def text(result: dict[str, Any]) -> str:
    """The result as markdown."""

    def ratio(row: dict[str, Any], key: str) -> str:
        if row["side"] == "packed":
            return "1"
        low, high = row[f"{key}_range"]
        return f"{row[f'{key}_ratio']:.2f} ({low:.2f} to {high:.2f})"

    rows = [
        (
            row["side"],
            f"{row['useful']:.1%}",
            f"{row['micro_batches']:.0f}",
            f"{row['update_cpu_s']:.2f}",
            ratio(row, "update_cpu_s"),
            f"{row['update_wall_s']:.2f}",
            ratio(row, "update_wall_s"),
            f"{row['anchor_cpu_s']:.2f}",
            ratio(row, "anchor_cpu_s"),
        )
        for row in result["rows"]
    ]
    head = (
        "side", "tokens / layer rows", "micro-batches", "update, CPU s", "/ packed (range)", "wall s",
        "/ packed (range)", "anchor, CPU s", "/ packed (range)",
    )  # fmt: skip
    judged = result["rows"][1]
    met = "met" if judged["update_cpu_s_ratio"] >= GOAL and judged["update_wall_s_ratio"] >= GOAL else "MISSED"
    return "\n\n".join(
        (
            "# Packed against padded training steps",
            f"The quickstart's policy (2 layers, H=96, V=512, float32) on the lengths of {result['steps']} of its RL "
            "steps (256 trajectories, 8 optimizer steps of 32 each; `packing_lengths.json`), in one process, "
            f"{result['rounds']} rounds in alternating order; medians, and medians and ranges of the ratios of one "
            "round. An update is 8 optimizer steps: forward, backward, AdamW. In the ratios the packed side's update "
            f"includes packing ({result['rows'][0]['packing_cpu_s'] * 1e3:.0f} ms), the padded sides' no padding. "
            "Micro-batches are per optimizer step. Padded sides: dense batches to the longest of the micro-batch; "
            f"{result['most']} sequences are what `policy.micro_batch_tokens` holds if all are as long as allowed "
            f"({result['longest']} tokens). Largest relative difference of a gradient before timing: "
            f"{result['agreement']:.0e}.",
            report.markdown(head, rows),
            f"Goal: the packed update at least {GOAL}x faster than {judged['side']}: {met} "
            f"({judged['update_cpu_s_ratio']:.2f}x CPU, {judged['update_wall_s_ratio']:.2f}x wall).",
            report.describe(result["environment"]),
        )
    )


def main(argv: list[str] | None = None) -> int:
    """The command line; exit status 0 also when the goal is missed: the text says it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packing", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one optimizer step, to see that it works")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="folder for packing.json and packing.md")
    options = parser.parse_args(argv)
    result = run(options.rounds, options.threads, options.quick)
    print(text(result))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "packing.json").write_text(json.dumps(result, indent=1) + "\n")
        (options.out / "packing.md").write_text(text(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
