"""What a step of a run costs: seconds and speed by phase, and how long trainer and engines wait for each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Self

from ctpo_megatron.report.run_data import RunData

COMPUTING = ("old_log_probs", "update")
"""Phases in which the trainer's devices compute."""
REST = "rest"
"""What no phase has: logging, the stop signal, weights released."""


@dataclass(frozen=True, slots=True)
class PhaseCost:
    """seconds: wall, mean of a step. share: of the step. Speeds are medians over steps, None where not recorded.

    tokens_per_s: of the phase's own tokens. tflops_per_s: model TFLOP/s. mfu: share of the devices' peak.
    """

    name: str
    seconds: float
    share: float
    tokens_per_s: float | None = None
    tflops_per_s: float | None = None
    mfu: float | None = None


@dataclass(frozen=True, slots=True)
class StepCost:
    """Of the RL steps of a run. step_s: wall seconds of a step, mean. phases: largest first, they add up to it.

    samples_per_s: trajectories that were sampled for training. tokens_per_s: prompts and observations included.
    trainer_waits: share of the time outside of `COMPUTING`. engines_idle: share of the time, mean over engines, in
    which nothing is in flight on an engine; None without a record of it.
    """

    step_s: float
    samples_per_s: float
    tokens_per_s: float | None
    phases: list[PhaseCost]
    trainer_waits: float
    engines_idle: float | None

    @classmethod
    def of(cls, run: RunData) -> Self | None:
        """None for a run without a timed step."""
        steps = [record for record in run.metrics if record["step"] > 0 and record.get("time/step")]
        if not steps:
            return None
        step_s = fmean(record["time/step"] for record in steps)
        seconds = {name: fmean(record.get(f"time/{name}") or 0.0 for record in steps) for name in _phases(run)}
        seconds[REST] = max(0.0, step_s - sum(seconds.values()))
        largest = sorted((name for name in seconds if seconds[name]), key=lambda name: -seconds[name])
        tokens = [record["tokens/total"] for record in steps if record.get("tokens/total")]
        samples = run.setting("rollout.prompts_per_step", 0) * run.setting("rollout.samples_per_prompt", 0)
        return cls(
            step_s,
            samples / step_s,
            fmean(tokens) / step_s if tokens else None,
            [PhaseCost(name, seconds[name], seconds[name] / step_s, *_speed(run, name)) for name in largest],
            1 - sum(seconds.get(name, 0.0) for name in COMPUTING) / step_s,
            run.engines_idle,
        )

    def mfu(self, phase: str) -> float | None:
        """Of a phase; None where it is not known."""
        return next((each.mfu for each in self.phases if each.name == phase), None)


def _phases(run: RunData) -> list[str]:
    """Whatever was timed; other times lack the CPU seconds that a phase has."""
    timed = [name.removeprefix("time/") for name in run.names if name.startswith("time/")]
    return [name for name in timed if f"time/{name}_cpu" in run.names and name != "step"]


def _speed(run: RunData, phase: str) -> Sequence[float | None]:
    names = (f"throughput/{phase}_{unit}" for unit in ("tokens_per_s", "model_tflops_per_s", "mfu"))
    return [median(found.values) if (found := run.series(name)) else None for name in names]
