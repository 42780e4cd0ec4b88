"""Rollout figures of a batch: of its trajectories, and of the engines while it was made."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from ctpo_megatron.data.records import TOOL_STATUSES
from ctpo_megatron.data.trajectory import Group
from ctpo_megatron.rollouts.filters import void_turn

RESPONSE_STATISTICS = ["response_length_mean", "model_tokens_mean", "turns_mean", "tool_use", "tool_calls", "truncated"]
RESPONSE_STATISTICS += ["max_turns", "tool_error_rate"]
"""The figures `rollout/*` that an evaluation has, too."""


def rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Flat `rollout/*`, `tokens/*` and `sandbox/*` figures of `groups`; empty when there are no trajectories.

    `docs/reference/metrics.md` defines each. `sandbox/*` is of all calls of all tools, malformed ones included; times
    are in seconds. Means and rates of what did not occur are omitted. Use of tools and length of programs have the
    names of the authors' code.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if not trajectories:
        return {}
    n = len(trajectories)
    calls = [call for trajectory in trajectories for call in trajectory.tool_calls]
    statuses: Counter[str] = Counter(call.status for call in calls)
    successes = [sum(call.status == "success" for call in trajectory.tool_calls) for trajectory in trajectories]
    called = sum(bool(trajectory.tool_calls) for trajectory in trajectories)
    reasons = Counter(trajectory.finish_reason for trajectory in trajectories)
    model = sum(trajectory.model_tokens for trajectory in trajectories)
    metrics = {
        "rollout/tool_use": sum(map(bool, successes)) / n,
        "rollout/tool_calls": len(calls) / n,
        "rollout/truncated": reasons["length"] / n,
        "rollout/max_turns": reasons["max_turns"] / n,
        "rollout/tool_budget": reasons["tool_budget"] / n,
        "rollout/turns_mean": sum(trajectory.turns for trajectory in trajectories) / n,
        "rollout/response_length_mean": sum(trajectory.response_tokens for trajectory in trajectories) / n,
        "rollout/model_tokens_mean": model / n,
        "tokens/model": float(model),
        "tokens/total": float(sum(map(len, trajectories))),
        "sandbox/calls": float(len(calls)),
        "sandbox/called/rate": called / n,
        "void_turn/rate": sum(bool(void_turn(t, group.prompt)) for group in groups for t in group.trajectories) / n,
    }
    if any(trajectory.sequence_starts for trajectory in trajectories):
        metrics["rollout/sequences_mean"] = sum(len(trajectory.sequences) for trajectory in trajectories) / n
    metrics |= {f"sandbox/{status}": float(statuses[status]) for status in TOOL_STATUSES}
    if calls:
        metrics["rollout/tool_error_rate"] = 1.0 - statuses["success"] / len(calls)
        metrics["sandbox/success/among_called_rate"] = sum(map(bool, successes)) / called
    programs = [(len(code.splitlines()), call) for call in calls if isinstance(code := call.arguments.get("code"), str)]
    figures = {
        "call_count": [len(trajectory.tool_calls) for trajectory in trajectories],
        "success_count": successes,
        "code_lines": [lines for lines, _ in programs],
        "code_lines_success": [lines for lines, call in programs if call.status == "success"],
    }
    for name, values in figures.items():
        if values:
            mean, least, most = sum(values) / len(values), float(min(values)), float(max(values))
            metrics |= {f"sandbox/{name}/mean": mean, f"sandbox/{name}/min": least, f"sandbox/{name}/max": most}
    for name in sorted({call.name for call in calls if call.name}):
        of_tool = [call.status for call in calls if call.name == name]
        metrics |= {f"tool/{name}/calls": float(len(of_tool)), f"tool/{name}/success": float(of_tool.count("success"))}
    if executed := [call.wall_s for call in calls if call.status != "parse_error"]:
        metrics["sandbox/wall_mean_s"] = sum(executed) / len(executed)
    if parts := [(call.queue_s, call.exec_s) for call in calls if call.queue_s is not None and call.exec_s is not None]:
        queued, ran = (sum(seconds) / len(parts) for seconds in zip(*parts, strict=True))
        metrics |= {"sandbox/queue_s": queued, "sandbox/exec_s": ran}
    return metrics


def engine_metrics(stats: Mapping[str, float]) -> dict[str, float]:
    """Return `rollout/*` of `EnginePool.stats`: what did not occur as 0, and the rate of weight updates, if any."""
    names = ["group_retries", "quarantined", "engine_restarts", "sync_s", "sync_bytes"]
    found = dict.fromkeys([*names, *(f"lost_{status}" for status in TOOL_STATUSES)], 0.0) | dict(stats)
    if found["sync_bytes"]:
        found["sync_gb_per_s"] = found["sync_bytes"] / 1e9 / found["sync_s"]
    return {f"rollout/{name}": float(value) for name, value in found.items()}


def staleness_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Return how far the model tokens of `groups` are behind the weights `version` that they train, in versions and
    tokens.
    """
    sampled = [t.tokens["weight_version"] for group in groups for t in group.trajectories]
    sampled = [versions[versions >= 0] for versions in sampled]
    lags = version - np.concatenate(sampled)
    continued = sum(int((versions > versions[:1]).sum()) for versions in sampled)
    return {
        "rollout/staleness_mean": float(lags.mean()),
        "rollout/staleness_max": float(lags.max()),
        "rollout/continued_tokens": continued / len(lags),
        "tokens/stale": float((lags > 0).sum()),
    }


def validation_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """`val/<data_source>/...` of scored groups: acc/mean@k, for k > 1 acc/best@k, `problems`, and how they answered.

    The accuracies are means over the problems with a verdict; `no_verdict` is the share of samples without one, if any.
    Raises ValueError for a trajectory that is not scored.
    """
    metrics, sources = dict[str, float](), defaultdict[str, list[Group]](list)
    for group in groups:
        sources[group.prompt.data_source].append(group)
    for source, of_source in sorted(sources.items()):
        rewards = [reward for group in of_source for reward in group.rewards]
        judged, k = [group.verdicts for group in of_source if group.verdicts], len(of_source[0].trajectories)
        figures = rollout_metrics(of_source)
        found = {name: figures[f"rollout/{name}"] for name in RESPONSE_STATISTICS if f"rollout/{name}" in figures}
        if judged:
            metrics[f"val/{source}/acc/mean@{k}"] = statistics.fmean(map(statistics.fmean, judged))
            found["problems"] = float(len(judged))
        if judged and k > 1:
            metrics[f"val/{source}/acc/best@{k}"] = statistics.fmean(map(max, judged))
        if None in rewards:
            found["no_verdict"] = rewards.count(None) / len(rewards)
        metrics |= {f"val/{source}/{name}": value for name, value in found.items()}
    return metrics
