"""A made-up run directory of the size of the quickstart, written with the room's own writers."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ctpo_megatron.base.run_paths import METRICS
from ctpo_megatron.config.schema import Config
from ctpo_megatron.data.records import Prompt, ToolCall
from ctpo_megatron.data.trajectory import Group, Trajectory
from ctpo_megatron.run import open_run_directory
from ctpo_megatron.tracking import MetricsWriter, write_trajectories

HOSTILE = "<script>alert('x')</script>"


def make_config(root: Path, name: str = "demo", **sections: Any) -> Config:
    """A small valid configuration with its run directory below `root`."""
    run = {"name": name, "root": str(root), "steps": 20} | sections.pop("run", {})
    inputs = {"model": {"path": "models/tiny"}, "data": {"train": ["train.parquet"], "eval": ["heldout.parquet"]}}
    return Config(run=run, **(inputs | sections))


def decode(ids: list[int]) -> str:
    """One character a token: the token's code point."""
    return "".join(map(chr, ids))


def encode(text: str) -> list[int]:
    """Inverse of `decode`."""
    return [ord(character) for character in text]


def make_trajectory(
    rng: random.Random, prompt: Prompt, sample: int, right: bool, final: str | None = None
) -> Trajectory:
    """An episode of one tool call and an answer, or a guess without a call."""
    trajectory = Trajectory(prompt.id, sample, seed=sample)

    def say(text: str, turn: int) -> None:
        ids = encode(text)
        log_probs = [math.log(rng.choice([0.999, 0.97, 0.8, 0.4, 0.05])) for _ in ids]
        trajectory.append_model(ids, log_probs, [0] * len(ids), turn)

    trajectory.append_context(prompt.token_ids, 0)
    if right or rng.random() < 0.6:
        code = "print(722 % 24)" if right else "print(722 // 24)"
        call = json.dumps({"name": "code_interpreter", "arguments": {"code": code}})
        say(f"<tool_call>\n{call}\n</tool_call><|im_end|>", 1)
        output = "2" if right else "30"
        observation = (
            f"\n<|im_start|>user\n<tool_response>\n{output}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        )
        trajectory.append_context(encode(observation), 1)
        status = "success" if rng.random() < 0.9 else "runtime_error"
        trajectory.tool_calls.append(ToolCall(1, "code_interpreter", {"code": code}, status, output, 0.021))
    answer = "2" if right else "30"
    trajectory.final_text = final or f"The answer is \\boxed{{{answer}}}."
    say(trajectory.final_text + "<|im_end|>", 2)
    trajectory.finish_reason, trajectory.reward = "answer", float(right)
    return trajectory


def make_groups(rng: random.Random, prompts: int, samples: int, share_right: float, final: str | None = None) -> list:
    """Groups of made-up episodes, about `share_right` of them right."""
    groups = []
    for index in range(prompts):
        question = f"Find the remainder when 722 is divided by {24 + index}."
        ids = tuple(encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"))
        prompt = Prompt(f"rem-{index}", "toolmath", ({"role": "user", "content": question},), "2", ids)
        sampled = [make_trajectory(rng, prompt, n, rng.random() < share_right, final) for n in range(samples)]
        groups.append(Group(prompt, sampled))
    return groups


def ratio_fields(rng: random.Random, groups: list[Group]) -> dict[int, dict[str, Any]]:
    """Per-token cumulative log-ratio and clip window of every trajectory, by its place."""
    fields: dict[int, dict[str, Any]] = {}
    for group in groups:
        for trajectory in group.trajectories:
            total, position = 0.0, 0
            rows: list[tuple[float, float, float]] = []
            for by_model in trajectory.response_mask:
                if by_model:
                    total, position = total + rng.gauss(0, 0.03), position + 1
                width = math.sqrt(position)
                rows.append((total, -0.025 * width, 0.05 * width))
            log_ratio, low, high = map(list, zip(*rows, strict=True))
            fields[len(fields)] = {
                "log_ratio": log_ratio, "clip_low": low, "clip_high": high, "advantage": 0.7,
            }  # fmt: skip
    return fields


NONE = ("reward/timeouts", "reward/failures", "rollout/group_retries", "rollout/engine_restarts")
NONE += ("sandbox/infrastructure_error",)
CLIPPED = {"total": 1.0, "high": 0.5, "low": 0.3, "dual": 0.2}


def step_metrics(rng: random.Random, step: int, steps: int) -> dict[str, float]:
    """Metrics of one RL step of a run that learns."""
    way = 1 - math.exp(-3 * step / steps)
    phases = {"rollout": 4.1, "reward": 0.4, "old_log_probs": 0.9, "update": 3.4, "publish": 0.3}
    phases = {name: value * rng.uniform(0.85, 1.2) for name, value in phases.items()}
    metrics = {f"time/{name}": value for name, value in phases.items()}
    metrics |= {f"time/{name}_cpu": value * 0.4 for name, value in phases.items()}
    wall = sum(phases.values()) + 0.2
    clip = 0.12 * (1 - way) + 0.02
    return metrics | {
        "time/step": wall,
        "reward/mean": 0.2 + 0.6 * way + rng.gauss(0, 0.03),
        "reward/std": 0.4,
        "reward/groups_mixed": 0.9 - 0.4 * way,
        "reward/no_box": round(40 * (1 - way)),
        "rollout/tool_use": 0.6 + 0.39 * way,
        "rollout/tool_error_rate": 0.12 * (1 - way),
        "rollout/truncated": 0.03 * (1 - way),
        "rollout/response_length_mean": 64 + 4 * way,
        "rollout/model_tokens_mean": 42 + 4 * way,
        **dict.fromkeys(NONE, 0),
        "actor/grad_norm": 0.5 + rng.random() * 0.3,
        **{f"pg_update/clip/{bound}/rate": clip * share for bound, share in CLIPPED.items()},
        "pg_update/is_ratio/mean": 1 + rng.gauss(0, 0.005),
        "pg_update/is_ratio/min": 0.3 + 0.2 * way,
        "pg_update/is_ratio/max": 5 - 3 * way + rng.random(),
        "pg_update/first_log_ratio_abs_max": 0.0,
        "mismatch/log_prob_abs_max": 3e-5 * rng.uniform(0.5, 1.5),
        "mismatch/log_prob_abs_mean": 2e-6 * rng.uniform(0.8, 1.2),
        "tokens/model": 11000,
        "tokens/total": 23000,
        "tokens/per_second": 23000 / wall,
        "throughput/rollout_tokens_per_s": 11000 / phases["rollout"],
        "throughput/old_log_probs_tokens_per_s": 23000 / phases["old_log_probs"],
        "throughput/update_tokens_per_s": 23000 / phases["update"],
        "throughput/rollout_model_tflops_per_s": 0.014 / phases["rollout"],
        "throughput/old_log_probs_model_tflops_per_s": 0.014 / phases["old_log_probs"],
        "throughput/update_model_tflops_per_s": 0.042 / phases["update"],
        "packing/useful_token_fraction": 0.985 + rng.gauss(0, 0.002),
        "packing/imbalance": 1.004,
        "time/update_overhead_fraction": 0.013,
        "memory/trainer_peak_mib": 640.0 + step,
        "memory/rank_0_peak_mib": 640.0 + step,
        "memory/rank_1_peak_mib": 610.0 + step,
    }


def logged(
    root: Path, *steps: Mapping[str, float], name: str = "demo", file: str = METRICS, first: int = 1, **sections: Any
) -> Path:
    """A run directory with a line of these metrics for each step. first: the number of the first one."""
    run_dir = open_run_directory(make_config(root, name, **sections))
    with MetricsWriter(run_dir, file_name=file) as writer:
        for step, metrics in enumerate(steps, start=first):
            writer.log(step, metrics)
    return run_dir


def write_run(root: Path, steps: int = 20, samples: int = 4, prompts: int = 4, final: str | None = None) -> Path:
    """A complete run directory."""
    rng = random.Random(0)
    run_dir = open_run_directory(make_config(root, rollout={"mismatch_limit": 1e-3}))
    with MetricsWriter(run_dir, file_name="sft.jsonl") as sft:
        for step in range(1, 61):
            sft.log(step, {"sft/loss": 3.2 * math.exp(-step / 12) + 0.2 * rng.random(), "sft/grad_norm": 1.0})
    with MetricsWriter(run_dir) as metrics:
        metrics.log(0, {"val/toolmath/acc/mean@1": 0.40})
        for step in range(1, steps + 1):
            last = {"val/toolmath/acc/mean@1": 0.94, "time/eval": 2.0} if step == steps else {}
            metrics.log(step, step_metrics(rng, step, steps) | last)
    for step, share in ((1, 0.25), (steps, 0.8)):
        groups = make_groups(rng, prompts, samples, share, final)
        write_trajectories(run_dir, step, groups, decode, extra=ratio_fields(rng, groups))
    for step, share in ((0, 0.4), (steps, 0.94)):
        write_trajectories(run_dir, step, make_groups(rng, prompts, 1, share), decode, folder="evaluation")
    stages = {"prepare": 3.1, "sft": 75.2, "rl": 9.3 * steps, "evaluation": 6.0, "export": 1.2}
    written = {name: {"wall": wall, "cpu": wall * 0.4} for name, wall in stages.items()}
    (run_dir / "stages.json").write_text(json.dumps(written))
    return run_dir
