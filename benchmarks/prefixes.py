"""Passes that compute tokens with the same history once, against passes over every token: one process, in turns.

    PYTHONPATH=.:answers:kernels:sandbox:launchers python -m benchmarks.prefixes RUN [--pretrained RUN]
        [--out benchmarks/results]

RUN: a run of the quickstart, whose dumps of two steps are trained on. A second case has long prompts of random tokens.
`--pretrained`: a run of configs/smollm2_tir.yaml, of whose first step one optimizer step is trained on.
Both sides are the same trainer but for `policy.share_prefixes`; log-probs are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.kernels import report
from ctpo_megatron.config import PolicyConfig, load_config
from ctpo_megatron.config.model_directory import read_spec
from ctpo_megatron.data import PrefixOrder, Trajectory, token_sequences
from ctpo_megatron.models import ModelSpec
from ctpo_megatron.objective import objective_from_config
from ctpo_megatron.policy import Layout, MiniBatch, Trainer, destroy_distributed, init_distributed, policy_gradient
from ctpo_megatron.policy.minibatch import make_mini_batches, packing_rules
from ctpo_megatron.tracking import recorded_trajectories, trajectory_files

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
SIDES = ("off", "auto")
TOLERANCE = 1e-4
MINI_BATCH = 32
"""Trajectories of an optimizer step: 4 prompts x 8 samples."""
ADVANTAGES = (-1.0, 0.5, 0.2, 1.3)
LONG_PROMPT, LONG_ANSWER, LONG_SAMPLES, LONG_HIDDEN, LONG_VOCABULARY = 4000, 1000, 16, 512, 4096


@dataclass(frozen=True)
class Case:
    """Trajectories that are trained on in optimizer steps of `size`, with the model of a directory."""

    name: str
    model: Path
    trajectories: Sequence[Trajectory]
    size: int
    micro_batch_tokens: int = 8192


def recorded(name: str, run: Path, step: int, model: str) -> Case:
    """A step that a run has dumped."""
    return Case(f"{name}, step {step}", run / model, recorded_trajectories(trajectory_files(run)[step]), MINI_BATCH)


def pretrained(run: Path) -> Case:
    """The first optimizer step of a run of SmolLM2."""
    case = recorded("SmolLM2-135M", run, 1, "sft_model")
    return replace(case, trajectories=case.trajectories[:MINI_BATCH], micro_batch_tokens=2048)


def long_prompt(folder: Path, hidden: int, layers: int) -> Case:
    """Answers of one long prompt, of random tokens, by a random model."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        return torch.randint(LONG_VOCABULARY, (count,), generator=generator).tolist()

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=LONG_VOCABULARY, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128, head_dim=64, intermediate_size=3 * hidden, max_position_embeddings=8192,
        tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    prompt, made = tokens(LONG_PROMPT), list[Trajectory]()
    for sample in range(LONG_SAMPLES):
        trajectory = Trajectory("long", sample, seed=0)
        trajectory.append_context(prompt, turn=0)
        trajectory.append_model(tokens(LONG_ANSWER), [-8.0] * LONG_ANSWER, [0] * LONG_ANSWER, 1)
        made.append(trajectory)
    name = f"prompt of {LONG_PROMPT}, {LONG_SAMPLES} answers of {LONG_ANSWER}, hidden {hidden}, {layers} layers"
    return Case(name, folder, made, LONG_SAMPLES, LONG_SAMPLES * (LONG_PROMPT + LONG_ANSWER))


class Side:
    """A trainer with one value of `policy.share_prefixes`."""

    def __init__(self, share: Any, case: Case, layout: Layout) -> None:
        config = load_config(QUICKSTART, [])
        policy = PolicyConfig(share_prefixes=share, micro_batch_tokens=case.micro_batch_tokens, threads=1)
        self._case, self._trainer = case, Trainer(policy, layout, case.model, temperature=1.0)
        self._trainer.use_optimizer(policy.optimizer, 10**6)
        self._loss = policy_gradient(objective_from_config(config.objective), config.objective.anchor)

    def lay_out(self) -> list[MiniBatch]:
        given = self._case.trajectories
        advantages = [ADVANTAGES[number % len(ADVANTAGES)] for number in range(len(given))]
        return self._trainer.distribute(given, advantages, self._case.size)

    def log_probs(self) -> dict[int, torch.Tensor]:
        """Of the start weights, by sequence."""
        minis = self.lay_out()
        self._trainer.compute_old_log_probs(minis)
        micros = [micro for mini in minis for micro in mini.micro_batches]
        return {place: micro.old_log_probs[at].clone() for micro in micros for place, at in micro.places()}  # type: ignore[index]

    def step(self) -> dict[str, float]:
        """CPU seconds of packing and old log-probs, and of the updates; rows and tokens."""
        began = time.process_time()
        minis = self.lay_out()
        self._trainer.compute_old_log_probs(minis)
        scored = time.process_time()
        for mini in minis:
            self._trainer.update(mini, self._loss)
        micros = [micro for mini in minis for micro in mini.micro_batches]
        return {
            "old_log_probs": scored - began,
            "update": time.process_time() - scored,
            "rows": float(sum(micro.num_rows for micro in micros)),
            "tokens": float(sum(micro.num_tokens for micro in micros)),
        }


def busiest(case: Case, spec: ModelSpec, replicas: int = 8) -> float:
    """Rows of the replica that has most of them in an optimizer step, over those without sharing; sums over steps."""
    one = {f"{of}_{what}": int(what == "size") for of in ("tp", "pp", "cp", "ep") for what in ("rank", "size")}
    sequences = token_sequences(case.trajectories)
    advantages = [ADVANTAGES[sequence.trajectory % len(ADVANTAGES)] for sequence in sequences]
    order = PrefixOrder.of([sequence.records["token_ids"] for sequence in sequences])
    found = list[int]()
    for known in (None, order):
        rows = list[list[int]]()
        for rank in range(replicas):
            layout = Layout(
                rank=0, world_size=1, dp_rank=rank, dp_size=replicas, device=torch.device("cpu"), **one
            )  # fmt: skip
            made = make_mini_batches(
                sequences, advantages, size=case.size, rules=packing_rules(PolicyConfig()), layout=layout,
                flops=spec.forward_flops, whole_attention=False, order=known,
            )  # fmt: skip
            rows.append([sum(micro.num_rows for micro in mini.micro_batches) for mini in made])
        found.append(sum(map(max, zip(*rows, strict=True))))
    return found[1] / found[0]


def measure(case: Case, rounds: int, layout: Layout) -> dict[str, Any]:
    """Medians, and medians of the ratios of one round."""
    torch.set_num_threads(1)
    sides = {share: Side(share, case, layout) for share in SIDES}
    whole, shared = (side.log_probs() for side in sides.values())
    apart = max(float((shared[place] - values).abs().max()) for place, values in whole.items())
    if not apart <= TOLERANCE:
        raise RuntimeError(f"{case.name}: log-probs differ by {apart:.1e} nats")
    samples: dict[str, list[dict[str, float]]] = {share: [] for share in SIDES}
    for number in range(rounds + 1):
        for share in SIDES if number % 2 else SIDES[::-1]:
            found = sides[share].step()
            if number:
                samples[share].append(found)
    off, auto = (samples[share] for share in SIDES)
    pairs = list(zip(auto, off, strict=True))
    both = [(a["old_log_probs"] + a["update"]) / (b["old_log_probs"] + b["update"]) for a, b in pairs]
    seconds = {share: {name: statistics.median(s[name] for s in samples[share]) for name in off[0]} for share in SIDES}
    return {
        "case": case.name,
        "rows": auto[0]["rows"] / auto[0]["tokens"],
        "apart": apart,
        "seconds": seconds,
        "old_log_probs": statistics.median(a["old_log_probs"] / b["old_log_probs"] for a, b in pairs),
        "update": statistics.median(a["update"] / b["update"] for a, b in pairs),
        "both": statistics.median(both),
        "range": (min(both), max(both)),
    }


def peak(case: Case, share: str, layout: Layout) -> float:
    """MiB that one step adds to the resident memory of this process."""
    side = Side(share, case, layout)
    side.log_probs()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    side.step()
    return _status("VmHWM") - before


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def text(results: Sequence[dict[str, Any]], environment: dict[str, Any]) -> str:
    """The results as markdown."""
    rows = [
        (
            found["case"],
            f"{found['rows']:.3f}",
            f"{found['busiest']:.2f}" if "busiest" in found else "",
            f"{found['seconds']['off']['update']:.2f}",
            f"{found['old_log_probs']:.2f}",
            f"{found['update']:.2f}",
            f"{found['both']:.2f} ({found['range'][0]:.2f} to {found['range'][1]:.2f})",
            f"{found['peak']:.2f}" if "peak" in found else "",
        )
        for found in results
    ]
    head = (
        "case", "rows / tokens", "busiest of 8 ranks", "update of all tokens, CPU s", "old log-probs", "update",
        "both (range)", "peak memory",
    )  # fmt: skip
    about = (
        "CPU seconds of passes that compute tokens with the same history once, over those of passes over every token: "
        "the same trainer, in one process and one thread, in alternating order. Old log-probs include packing; an "
        "update is forward, backward and AdamW. Medians of the ratios of a round. Busiest of 8 ranks: its rows over "
        "those of the busiest without sharing, in a job of eight data-parallel ranks. Peak memory: what one step adds."
    )
    parts = ("# Tokens with the same history", about, report.markdown(head, rows), report.describe(environment))
    return "\n\n".join(parts)


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefixes", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--rounds", type=int, default=5, help="with the run; 0: none")
    parser.add_argument("--pretrained", type=Path, metavar="RUN", help="of configs/smollm2_tir.yaml")
    parser.add_argument("--long-rounds", type=int, default=1, help="with long prompts; 0: none")
    parser.add_argument("--layers", type=int, default=2, help="of the model with long prompts")
    parser.add_argument("--out", type=Path, help="folder for prefixes.json and prefixes.md")
    options = parser.parse_args(argv)
    environment = report.environment("cpu", 1)
    layout, results = init_distributed(PolicyConfig(), seed=0), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        if options.rounds:
            last = max(trajectory_files(options.run))
            for step, model in ((1, "sft_model"), (last, "model")):
                case = recorded("quickstart", options.run, step, model)
                about = {"busiest": busiest(case, read_spec(case.model))}
                results.append(measure(case, options.rounds, layout) | about)
        if options.pretrained:
            results.append(measure(pretrained(options.pretrained), 1, layout))
        if options.long_rounds:
            case = long_prompt(Path(folder), LONG_HIDDEN, options.layers)
            results.append(measure(case, options.long_rounds, layout))
            shared = peak(case, "auto", layout)
            results[-1]["peak"] = shared / peak(case, "off", layout)
    destroy_distributed()
    print(text(results, environment))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "prefixes.json").write_text(json.dumps([environment, *results], indent=1) + "\n")
        (options.out / "prefixes.md").write_text(text(results, environment) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
