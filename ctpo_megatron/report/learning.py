"""Whether a run can learn: warnings about its first batch, and rows of the report's health section."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ctpo_megatron.report.best import best_step
from ctpo_megatron.report.decline import decline_of
from ctpo_megatron.report.run_data import RunData, Series

MANY = 0.5
"""Share of the trajectories, or of the tool calls, from which a warning is given."""

FALLEN = "Likely: policy.optimizer.lr is too high. An earlier checkpoint may be better (checkpoint.keep_best)"
"""What to do when a run has got worse than its start."""

_FAILURES = {
    "parse_error": "the model does not write calls as rollout.tool_parser reads them",
    "timeout": "the programs run longer than sandbox.run_timeout_s",
    "runtime_error": "the programs raise errors, or read what the sandbox does not have",
}


@dataclass(frozen=True)
class Indicator:
    """One line of the health section; `good` None: not judged."""

    label: str
    value: str
    good: bool | None
    note: str


def first_batch_warnings(metrics: Mapping[str, float], dump: str, *, tools: bool) -> Iterator[str]:
    """Reasons why nothing can be learned from a batch, each with its likely cause and where to look; empty if there is
    none.

    metrics: of the step; missing ones are not judged. dump: the file with its trajectories. tools: whether the model
    can call any (`RolloutConfig.can_call_tools`).
    """
    yield from _no_verdict(metrics, dump)
    yield from _no_signal(metrics, dump)
    yield from _no_answer(metrics, dump)
    yield from _no_tool(metrics, dump, tools)
    if repeated := metrics.get("rollout/prompts_repeated"):
        fix = "lower rollout.prompts_per_step, or give more data"
        yield f"{repeated:.0f} groups are of a prompt that the batch already has: data.train is small; {fix}"


def _no_verdict(metrics: Mapping[str, float], dump: str) -> Iterator[str]:
    if share := metrics.get("reward/no_verdict", 0.0):
        cause = "the reward function raises, takes longer than reward.timeout_s, or returns None or NaN"
        look = f"see `no_verdict` in {dump}"
        yield f"{share:.0%} of the trajectories have no verdict, and teach nothing. Likely: {cause}; {look}"


def _no_signal(metrics: Mapping[str, float], dump: str) -> Iterator[str]:
    if metrics.get("reward/no_verdict") == 1:
        return  # said already
    if metrics.get("reward/groups_mixed") == 0:
        same, mean = metrics["reward/std"] == 0, metrics["reward/mean"]
        rewards = f"all rewards are {mean:g}" if same else "the rewards within each group are equal"
        if not same:
            cause = "samples of a prompt that are all alike (rollout.temperature)"
        elif mean > 0:
            cause = "a task that is too easy"
        else:
            cause = "ground truths that the reward cannot match, answers in another form, or a task far too hard"
        look = f"compare `final_text` and `answer` in {dump}"
        yield f"no group has both outcomes: {rewards}, so the gradient is zero. Likely: {cause}; {look}"
    elif metrics.get("actor/grad_norm_max") == 0:
        filtered = metrics.get("rollout/masked_tokens") == 1
        cause = "rollout.filters took every token out of the loss" if filtered else "every token is clipped"
        look = "see rollout/masked_* and pg_update/clip/* in metrics.jsonl"
        yield f"the gradient is zero, though groups have both outcomes. Likely: {cause}; {look}"


def _no_answer(metrics: Mapping[str, float], dump: str) -> Iterator[str]:
    without = metrics.get("reward/no_box", 0.0) / max(1.0, _trajectories(metrics))
    if without >= MANY:
        cause = "the prompt does not ask for a box, or the response ends before it"
        share = f"{without:.0%} of the answers have no complete \\boxed{{}}, and earn nothing"
        yield f"{share}. Likely: {cause}; see `segments` in {dump}"
    if (cut := metrics.get("rollout/truncated", 0.0)) >= MANY:
        cause = "rollout.max_response_tokens or max_turn_tokens is small, or the model does not end its turns"
        yield f"{cut:.0%} of the trajectories were cut off by a token limit. Likely: {cause}; see `segments` in {dump}"


def _no_tool(metrics: Mapping[str, float], dump: str, tools: bool) -> Iterator[str]:
    if tools and metrics.get("sandbox/calls") == 0:
        cause = "the prompt does not offer the tools, or the model writes calls that rollout.tool_parser does not read"
        yield f"no tool was called. Likely: {cause}; see `segments` in {dump}"
    if (failed := metrics.get("rollout/tool_error_rate", 0.0)) >= MANY:
        status = max(_FAILURES, key=lambda name: metrics[f"sandbox/{name}"])
        count, calls = metrics[f"sandbox/{status}"], metrics["sandbox/calls"]
        shown = f"{failed:.0%} of the tool calls failed, {count:.0f} of {calls:.0f} with {status}"
        yield f"{shown}. Likely: {_FAILURES[status]}; see `tool_calls` in {dump}"


def _trajectories(metrics: Mapping[str, float]) -> float:
    """How many trajectories were sampled; 0 if unknown."""
    each = metrics.get("rollout/model_tokens_mean", 0.0)
    return round(metrics["tokens/model"] / each) if each else 0.0


def learning_checks(run: RunData) -> Iterator[Indicator]:
    """Rows of the report, for the metrics that the run has."""
    yield from _trends(run)
    yield from _best(run)
    if mixed := run.series("reward/groups_mixed"):
        note = "no group had both outcomes: compare `final_text` and `answer` in trajectories/"
        yield _steps("Steps without signal", mixed, note)
    if missing := run.series("reward/no_verdict"):  # of the steps that miss any
        most, note = max(missing.values), f"largest share of a step, in {len(missing.values)} steps; they teach nothing"
        yield Indicator("Without a verdict", f"{most:.0%}", most < MANY, f"{note}: see `no_verdict` in trajectories/")
    if norm := run.series("actor/grad_norm_max"):
        note = "in all optimizer steps: no signal, or rollout.filters took every token out of the loss"
        yield _steps("Steps with zero gradient", norm, note)
    if boxes := _no_box(run):
        yield _share("Answers without a box", boxes, "they earn nothing: does the prompt ask for \\boxed{}?")
    if cut := run.series("rollout/truncated"):
        yield _share("Cut off", cut, "by rollout.max_response_tokens, max_turn_tokens or the context")
    if failed := run.series("rollout/tool_error_rate"):
        yield _share("Failed tool calls", failed, "see sandbox/* in metrics.jsonl and `tool_calls` in trajectories/")
    if repeated := run.series("rollout/prompts_repeated"):
        most = max(repeated.values)
        note = "groups of a prompt that the batch already had, in the worst step; data.train may be too small"
        yield Indicator("Repeated prompts", f"{most:,.0f}", most == 0, note)


def _trends(run: RunData) -> Iterator[Indicator]:
    decline = decline_of(run.metrics, run.setting("rollout.prompts_per_step", 1))
    for trend in decline.trends().values():
        note = f"start → end; it fell by more than noise explains. {FALLEN}" if trend.worse else "start → end"
        yield Indicator(trend.label.capitalize(), f"{trend.start:.3g} → {trend.now:.3g}", not trend.worse, note)


def _best(run: RunData) -> Iterator[Indicator]:
    if (best := best_step(run)) is not None:
        yield Indicator("Best step", f"{best.step}", None, f"{best.measure} {best.value:.3g}: {best.where}")


def _steps(label: str, series: Series, note: str) -> Indicator:
    """How many steps have a zero; one in ten is no reason to worry."""
    zero = series.values.count(0.0)
    return Indicator(label, f"{zero} of {len(series.values)}", zero <= len(series.values) / 10, note)


def _share(label: str, series: Series, note: str) -> Indicator:
    mean = sum(series.values) / len(series.values)
    last = series.values[-1]
    shown = f"mean of all steps, {last:.0%} in the last; {note}"
    return Indicator(label, f"{mean:.0%}", mean < MANY and last < MANY, shown)


def _no_box(run: RunData) -> Series | None:
    """Share of the trajectories of each step."""
    steps = [record for record in run.metrics if record.get("reward/no_box") is not None and _trajectories(record)]
    shares = [record["reward/no_box"] / _trajectories(record) for record in steps]
    return Series([record["step"] for record in steps], shares) if steps else None
