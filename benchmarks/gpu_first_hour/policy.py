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
from transformers import AutoConfig, AutoModelForCausalLM

from ctpo_megatron.config import Config, Job, load_config, objective_from_config
from ctpo_megatron.data import Trajectory
from ctpo_megatron.policy import Trainer, destroy_distributed, init_distributed, peak_flops, policy_gradient
from ctpo_megatron.preflight.placement import GIB, GpuMemory

ROOT = Path(__file__).resolve().parents[2]
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
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"model.path={folder}", *options.overrides]
        if options.device == "cpu":
            overrides += ["policy.dtype=float32", "policy.offload=none", "rollout.max_response_tokens=256"]
            overrides += ["policy.micro_batch_tokens=2048"]
        config = load_config(options.recipe, overrides)
        _write_model(options.shapes, Path(folder), options.device)
        figures = measure(config, Path(folder), options.trajectories, options.updates)
    options.out.write_text(json.dumps(figures) + "\n")


def measure(config: Config, model: Path, count: int, updates: int) -> dict[str, float]:
    """Medians over the updates after the first, which compiles; memory in GiB."""
    layout = init_distributed(config.policy, seed=0)
    cuda = layout.device.type == "cuda"
    try:
        began = time.perf_counter()
        trainer = Trainer(config.policy, layout, model, temperature=config.rollout.temperature)
        figures = {"load_s": time.perf_counter() - began}
        trainer.use_optimizer(config.policy.optimizer, total_steps=updates)
        objective = objective_from_config(config.objective)
        loss = policy_gradient(objective, config.objective.anchor)
        measured: dict[str, list[float]] = {"old_log_probs_s": [], "update_s": [], "forward_tflop": [], "tokens": []}
        for number in range(updates):
            found = trajectories(config, trainer.spec.vocab_size, count, seed=number)
            advantages = [1.0 if index % 2 else -1.0 for index in range(count)]
            (mini_batch,) = trainer.distribute(found, advantages, count)
            began = time.perf_counter()
            trainer.compute_old_log_probs([mini_batch])
            measured["old_log_probs_s"].append(_since(began, cuda))
            began = time.perf_counter()
            update = trainer.update(mini_batch, loss)
            measured["update_s"].append(_since(began, cuda))
            measured["forward_tflop"].append(update.cost.work.trained_flops / 1e12)
            measured["tokens"].append(float(update.cost.work.trained_tokens))
            if number == 0:
                figures["first_update_s"] = measured["update_s"][0]
                diagnostics = trainer.token_diagnostics(mini_batch, objective, "proximal")
                of_tokens = np.concatenate([np.abs(each["log_ratio"]) for each in diagnostics.values()])
                figures["first_log_ratio_abs_max"] = float(of_tokens.max())
                if cuda:
                    torch.cuda.reset_peak_memory_stats()
            del mini_batch
            print(
                f"update {number + 1}: {measured['update_s'][-1]:.2f} s, loaded in {figures['load_s']:.1f} s",
                flush=True,
            )
        rest = {name: statistics.median(values[1:]) for name, values in measured.items()}
        figures |= rest | {"tokens_per_s": rest["tokens"] / rest["update_s"]}
        if cuda:
            figures |= _memory(config, trainer)
            share = 3 * rest["forward_tflop"] * 1e12 / rest["update_s"] / (peak_flops(config.policy) or float("nan"))
            figures["share_of_peak_flops"] = share
        return figures
    finally:
        destroy_distributed()


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


def _memory(config: Config, trainer: Trainer) -> dict[str, float]:
    """Peaks beside what the dry run plans for the trainer, and what stays while engines sample."""
    total = torch.cuda.get_device_properties(0).total_memory
    memory = GpuMemory(config, Job(1, 1), trainer.spec, total / GIB)
    planned = {moment.when: moment.parts["trainer"] for moment in memory.moments if "trainer" in moment.parts}
    found: dict[str, float] = {
        "allocated_in_update_gib": torch.cuda.max_memory_allocated(),
        "reserved_in_update_gib": torch.cuda.max_memory_reserved(),
        "planned_in_update_gib": planned["in an update"],
        "planned_while_sampling_gib": planned["while sampling"],
    }
    seconds = {"first_release_s": _released(trainer)}
    found["allocated_while_sampling_gib"] = torch.cuda.memory_allocated()
    found["reserved_while_sampling_gib"] = torch.cuda.memory_reserved()
    began = time.perf_counter()
    for _ in trainer.weights():
        pass
    seconds["reclaim_and_read_weights_s"] = _since(began, cuda=True)
    seconds["release_s"] = _released(trainer)
    return {name: value / GIB for name, value in found.items()} | seconds


def _released(trainer: Trainer) -> float:
    began = time.perf_counter()
    trainer.release()
    trainer.empty_cache()
    return _since(began, cuda=True)


def _since(began: float, cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _write_model(shapes: Path, folder: Path, device: str) -> None:
    """A model of these shapes with random weights, in bfloat16 on a GPU."""
    shape: dict[str, Any] = json.loads(shapes.read_text())
    if device == "cpu":
        shape |= {
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "vocab_size": 500,
            "head_dim": 16,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
    (folder / "config.json").write_text(json.dumps(shape))
    with torch.device(device):
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    model.save_pretrained(folder)


if __name__ == "__main__":
    main()
