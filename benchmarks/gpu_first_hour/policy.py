"""The policy of a recipe on one device: an optimizer step on random trajectories, in seconds and bytes beside the plan.

The architecture is the recipe's, the weights are random. Old log-probs come from a pass of the same weights, so that
every log-ratio of the first update has to be zero: what is not shows that two passes compute different numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_first_hour import update_profile
from benchmarks.gpu_first_hour.reference import ROOT, write_model
from ctpo_megatron.config import (
    Config,
    Job,
    load_config,
    objective_from_config,
    spec_for,
)
from ctpo_megatron.data import Trajectory
from ctpo_megatron.plan import (
    GIB,
    GpuMemory,
    settled,
)
from ctpo_megatron.policy import (
    MiniBatch,
    Trainer,
    destroy_distributed,
    device_name,
    init_distributed,
    policy_gradient,
    product_precision,
)
from ctpo_megatron.tracking import peak_flops

PROMPT_TOKENS, SHARE_OF_TOOLS = 200, 0.2
MEDIAN_RESPONSE, SIGMA = 1200.0, 0.8
"""Of the log-normal response lengths, in tokens; cut off at the recipe's longest."""


def main() -> None:
    """Write the figures as JSON to `--out`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_first_hour.policy", description=__doc__)
    parser.add_argument("--recipe", type=Path, default=ROOT / "configs" / "qwen3_1_7b_one_gpu.yaml")
    parser.add_argument("--shapes", type=Path, default=ROOT / "configs" / "models" / "qwen3_1_7b.json")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: two thin layers in float32")
    parser.add_argument("--trajectories", type=int, default=48, help="of an optimizer step")
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--cap-gib", type=float, help="the most GPU memory that torch may take, as on a smaller card")
    parser.add_argument("--profile", action="store_true", help="one more update, under torch's profiler")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    if options.cap_gib:
        torch.cuda.set_per_process_memory_fraction(options.cap_gib * GIB / _card_bytes())
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"model.path={folder}"]
        if options.device == "cpu":
            overrides += ["policy.dtype=float32", "policy.offload=none", "rollout.max_response_tokens=256"]
            overrides += ["policy.micro_batch_tokens=2048"]
        config = load_config(options.recipe, [*overrides, *options.overrides])
        write_model(options.shapes, Path(folder), options.device)
        if options.device == "cuda":  # as the run would: `auto` by the memory plan, for the card or what is left of it
            card_gib = options.cap_gib or _card_bytes() / GIB
            config = settled(config, Job(1, 1), spec_for(config), card_gib)
        bench = Bench(config, Path(folder), options.trajectories, options.updates)
        try:
            figures = bench.measure(options.cap_gib)
            if options.profile:
                figures |= bench.profile()
        finally:
            destroy_distributed()
    options.out.write_text(json.dumps(figures) + "\n")


class Bench:
    """A trainer of one rank, and mini-batches of `count` random trajectories for its updates."""

    def __init__(self, config: Config, model: Path, count: int, updates: int) -> None:
        """updates: that `measure` does, two or more."""
        self._config, self._count, self._updates = config, count, updates
        layout = init_distributed(config.policy, seed=0)
        self._cuda = layout.device.type == "cuda"
        began = time.perf_counter()
        self._trainer = Trainer(config.policy, layout, model, temperature=config.rollout.temperature)
        self._load_s = time.perf_counter() - began
        self._trainer.use_optimizer(config.policy.optimizer, total_steps=updates + 2)  # two more by `profile`
        self._objective = objective_from_config(config.objective)
        self._loss = policy_gradient(self._objective, config.objective.anchor)

    def _mini_batch(self, seed: int) -> MiniBatch:
        sampled = trajectories(self._config, self._trainer.spec.vocab_size, self._count, seed)
        advantages = [1.0 if index % 2 else -1.0 for index in range(self._count)]
        (mini_batch,) = self._trainer.distribute(sampled, advantages, self._count)
        return mini_batch

    def measure(self, cap_gib: float | None) -> dict[str, Any]:
        """Medians over the updates after the first, which compiles; memory in GiB.

        cap_gib: of GPU memory that torch may take; None: all.
        """
        chosen = self._config.policy.chosen
        figures: dict[str, Any] = {"load_s": self._load_s}
        figures |= {"micro_batch_tokens": chosen.micro_batch_tokens, "recompute": chosen.recompute}
        measured: dict[str, list[float]] = {"old_log_probs_s": [], "update_s": [], "forward_tflop": [], "tokens": []}
        for number in range(self._updates):
            mini_batch = self._mini_batch(number)
            began = time.perf_counter()
            self._trainer.compute_old_log_probs([mini_batch])
            measured["old_log_probs_s"].append(_since(began, self._cuda))
            began = time.perf_counter()
            update = self._trainer.update(mini_batch, self._loss)
            measured["update_s"].append(_since(began, self._cuda))
            measured["forward_tflop"].append(update.work.trained_flops / 1e12)
            measured["tokens"].append(float(update.work.trained_tokens))
            if number == 0:
                figures["first_update_s"] = measured["update_s"][0]
                diagnostics = self._trainer.token_diagnostics(mini_batch, self._objective, "proximal")
                of_tokens = np.concatenate([np.abs(of_one["log_ratio"]) for of_one in diagnostics.values()])
                figures["first_log_ratio_abs_max"] = float(of_tokens.max())
                if self._cuda:
                    torch.cuda.reset_peak_memory_stats()
            del mini_batch
            print(f"update {number + 1}: {measured['update_s'][-1]:.2f} s, loaded in {self._load_s:.1f} s", flush=True)
        rest = {name: statistics.median(values[1:]) for name, values in measured.items()}
        figures |= rest | {"tokens_per_s": rest["tokens"] / rest["update_s"]}
        if self._cuda:
            figures |= _memory(self._config, self._trainer, cap_gib)
            peak = peak_flops(device_name(), product_precision(self._config.policy.dtype)) or float("nan")
            figures["share_of_peak_flops"] = 3 * rest["forward_tflop"] * 1e12 / rest["update_s"] / peak
        return figures

    def profile(self) -> dict[str, Any]:
        """One update under torch's profiler; see `update_profile.figures`."""
        mini_batch = self._mini_batch(self._updates)
        self._trainer.compute_old_log_probs([mini_batch])
        self._trainer.update(mini_batch, self._loss)  # whatever was released is back
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        with profile(activities=activities) as profiler:
            self._trainer.update(mini_batch, self._loss)
            if self._cuda:
                torch.cuda.synchronize()
        layers = self._trainer.spec.num_layers * len(mini_batch.micro_batches)
        return update_profile.figures(profiler, layers)


def trajectories(config: Config, vocabulary: int, count: int, seed: int) -> list[Trajectory]:
    """Prompt, model turn, tool output, model turn; lengths as long-tailed as answers are."""
    rng = np.random.default_rng(seed)
    longest = config.rollout.max_response_tokens
    result = []
    for index in range(count):
        response = int(min(longest, max(8, rng.lognormal(np.log(min(MEDIAN_RESPONSE, longest / 4)), SIGMA))))
        tool = int(SHARE_OF_TOOLS * response)
        first = (response - tool) // 2
        trajectory = Trajectory(f"p{index // 8}", index % 8, seed=index)
        trajectory.append_context(_ids(rng, vocabulary, PROMPT_TOKENS), turn=0)
        trajectory.append_model(_ids(rng, vocabulary, first), [-12.0] * first, [0] * first, 1)
        trajectory.append_context(_ids(rng, vocabulary, tool), turn=1)
        last = response - tool - first
        trajectory.append_model(_ids(rng, vocabulary, last), [-12.0] * last, [0] * last, 2)
        result.append(trajectory)
    return result


def _ids(rng: np.random.Generator, vocabulary: int, count: int) -> list[int]:
    ids: list[int] = rng.integers(vocabulary, size=count).tolist()
    return ids


def _card_bytes() -> int:
    return torch.cuda.get_device_properties(0).total_memory


def _memory(config: Config, trainer: Trainer, cap_gib: float | None) -> dict[str, float]:
    """Peaks beside what the dry run plans for the trainer, and what stays while engines sample."""
    memory = GpuMemory(config, Job(1, 1), trainer.spec, cap_gib or _card_bytes() / GIB)
    planned = {moment.when: moment.parts["trainer"] for moment in memory.moments if "trainer" in moment.parts}
    sizes: dict[str, float] = {
        "allocated_in_update_gib": torch.cuda.max_memory_allocated(),
        "reserved_in_update_gib": torch.cuda.max_memory_reserved(),
        "planned_in_update_gib": planned["in an update"],
        "planned_while_sampling_gib": planned["while sampling"],
    }
    seconds = {"first_release_s": _released(trainer)}
    sizes["allocated_while_sampling_gib"] = torch.cuda.memory_allocated()
    sizes["reserved_while_sampling_gib"] = torch.cuda.memory_reserved()
    began = time.perf_counter()
    for _ in trainer.weights():
        pass
    seconds["reclaim_and_read_weights_s"] = _since(began, cuda=True)
    seconds["release_s"] = _released(trainer)
    over_plan = sizes["reserved_in_update_gib"] / sizes["planned_in_update_gib"]
    return {name: value / GIB for name, value in sizes.items()} | seconds | {"reserved_over_planned": over_plan}


def _released(trainer: Trainer) -> float:
    began = time.perf_counter()
    trainer.release()
    trainer.empty_cache()
    return _since(began, cuda=True)


def _since(began: float, cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
