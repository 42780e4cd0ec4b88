"""The section Health of the report: numbers that should be zero or small, each judged."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from ctpo_megatron.report.groups import RunGroup
from ctpo_megatron.report.learning import Indicator, learning_checks
from ctpo_megatron.report.positions import Growth, late_positions
from ctpo_megatron.report.run_data import RunData
from ctpo_megatron.tracking import DUMP_FAILURES

ROUNDING = {"float32": 0.005, "bfloat16": 0.05, "float16": 0.02}
"""Mean |sampler - trainer log-prob| in nats that rounding gives at most, by the precision of both; generous."""
_NEVER_TOKENS = 1e9


def checks(run: RunData) -> Iterator[Indicator]:
    """Rows of the health section: whether the run could learn, and numbers that should be zero or small."""
    yield from learning_checks(run)
    yield from _mismatch(run)
    yield from _router(run)
    yield from _noise(run)
    yield from _position_law(run)
    note = "nats in the first mini-batch; above 0.001 the pass for old log-probs and the training pass disagree"
    first = run.series("pg_update/first_log_ratio_abs_max")
    if first and run.setting("objective.anchor") != "behaviour":  # there the first ratio compares sampler and trainer
        yield Indicator("First log-ratio", f"{max(first.values):.2g}", max(first.values) <= 1e-3, note)
    for metric, label, note in (
        ("sandbox/infrastructure_error", "Sandbox failures", "tool calls the service could not serve"),
        ("rollout/group_retries", "Groups retried", "replaced as a whole, never trained on in part"),
        ("rollout/engine_restarts", "Engine restarts", ""),
        ("reward/failures", "Scorer failures", "exceptions: no verdict"),
        ("reward/timeouts", "Scorer timeouts", "reward.timeout_s: no verdict"),
        ("reward/crashes", "Scorer crashes", "its process died: no verdict"),
        ("reward/nones", "Scorer without an answer", "returned None: no verdict"),
        ("reward/not_finite", "Scorer not finite", "NaN or infinite: no verdict"),
        ("tracking/failures", "Tracker failures", "calls of a tracker; the run continued"),
        (DUMP_FAILURES, "Dumps lost", "their trajectories are not on disk (train.log says why); the run continued"),
    ):
        if series := run.series(metric):
            yield Indicator(label, f"{sum(series.values):,.0f}", sum(series.values) == 0, note)
    if overflows := run.series("actor/overflow_steps"):
        scale = run.series("actor/loss_scale")
        note = f"optimizer steps skipped in float16; loss scale {scale.values[-1]:,.0f} at last" if scale else ""
        yield Indicator("Gradient overflows", f"{sum(overflows.values):,.0f}", None, note)
    yield from _packing(run)
    nonfinite = run.series("tracking/nonfinite")
    count = sum(nonfinite.values) if nonfinite else 0.0
    yield Indicator("Non-finite metrics", f"{count:,.0f}", count == 0, "values that were NaN or infinite")


def _mismatch(run: RunData) -> Iterator[Indicator]:
    """Judged by the limit, or without one by the rounding of the precision. Two precisions are never good."""
    if not (largest := run.series("mismatch/log_prob_abs_max")):
        return
    value, label = f"{max(largest.values):.2g}", "Sampler–trainer mismatch"
    trainer, chosen = (run.setting(key) or "" for key in ("policy.dtype", "rollout.engine.dtype"))
    sampler = trainer if chosen == "auto" else chosen
    limit, means = run.setting("rollout.mismatch_limit"), run.series("mismatch/log_prob_abs_mean")
    rounding = ROUNDING.get(trainer)
    if trainer != sampler and run.setting("rollout.replay") is None:
        note = f"nats; policy.dtype is {trainer}, rollout.engine.dtype {sampler}: give both the same (auto)"
        yield Indicator(label, value, False, note)
    elif limit is not None:
        yield Indicator(label, value, max(largest.values) <= limit, f"nats; limit {limit:g}")
    elif means and rounding is not None:
        mean = max(means.values)
        note = f"nats; mean {mean:.2g}, {trainer} on both sides (policy.dtype, rollout.engine.dtype) has {rounding:g}"
        yield Indicator(label, value, mean <= rounding, f"{note} at most, unless a weight sync was lost")
    else:
        yield Indicator(label, value, None, "nats; no limit set")


def _router(run: RunData) -> Iterator[Indicator]:
    """Of a mixture of experts, which alone has these metrics."""
    if not (unrecorded := run.series("mismatch/router_unrecorded")):
        return
    label, missing = "Router agreement", max(unrecorded.values)
    if agreement := run.series("mismatch/router_agreement"):
        note = "of the choices of experts, in the worst step; the trainer takes the sampler's (policy.router_replay)"
        if missing:
            note = f"{missing:.1%} of the tokens of a step had no record and were routed by the trainer"
        yield Indicator(label, f"{min(agreement.values):.2%}", not missing, note)
    else:
        note = "policy.router_replay is off" if not run.setting("policy.router_replay") else "no token had a record"
        yield Indicator(label, "unknown", None, f"{note}: sampler and trainer may take different experts")


def _noise(run: RunData) -> Iterator[Indicator]:
    longest = run.setting("rollout.max_response_tokens")
    if (crossing := run.series("mismatch/t_star")) and longest:
        note = f"where sampler–trainer noise alone leaves the clip window; a response has up to {longest:,}"
        first = min(crossing.values)
        # Noise of rounding alone would need more tokens than any response has: a number would say nothing.
        where = "never" if first >= _NEVER_TOKENS else f"token {first:,.3g}"
        yield Indicator("Noise position", where, first >= longest, note)


def _position_law(run: RunData) -> Iterator[Indicator]:
    """Of the last mini-batch of the steps of `tracking.dump_every` in the second half of the run."""
    group = RunGroup("", {"": (run,)}, {})
    if (late := late_positions(group, "last")) is None:
        return
    if (law := (found := Growth.of(late)).law) is not None:
        note = f"{found.verdict}; last mini-batch, second half of the run (positions.jsonl)"
        note += f". {found.why_not}" if found.why_not else ""
        yield Indicator("Position law", f"t^{law.exponent:.2f}", None, note)


def _packing(run: RunData) -> Iterator[Indicator]:
    """Of the steps that trained: one without tokens computes nothing, and its shares say nothing."""
    idle = {record["step"] for record in run.metrics if record.get("packing/useful_token_fraction") == 0}

    def trained(metric: str) -> list[float]:
        series = run.series(metric)
        pairs = zip(series.steps, series.values, strict=True) if series else ()
        return [value for step, value in pairs if step not in idle]

    if idle:
        label, count = "Steps without tokens", len(idle)
        yield Indicator(label, f"{count}", False, "nothing was trained on: see Steps without signal")
    if useful := trained("packing/useful_token_fraction"):
        note = "of the rows computed, in the worst step"
        yield Indicator("Useful tokens", f"{min(useful):.1%}", min(useful) >= 0.95, note)
    if overhead := trained("time/update_overhead_fraction"):
        middle = statistics.median(overhead)
        note = "of the update outside of passes and optimizer, median"
        yield Indicator("Update overhead", f"{middle:.1%}", middle < 0.1, note)
    if imbalance := trained("packing/imbalance"):
        middle = statistics.median(imbalance)
        note = "largest over mean model FLOPs of the data-parallel ranks, median"
        yield Indicator("Rank imbalance", f"{middle:.3f}", middle < 1.1, note)
