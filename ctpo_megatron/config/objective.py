"""An objective is ratio x clip x aggregation; a preset is a named combination with its published numbers."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from ctpo_megatron.config.problems import ConfigError, Problem
from ctpo_megatron.config.schema import ObjectiveConfig

RatioKind = Literal["cumulative", "geomean", "token", "sequence", "sequence_geomean"]
ClipKind = Literal["log_power", "ratio"]
AggregationKind = Literal["sequence_mean", "token_mean", "sequence_sum"]


@dataclass(frozen=True)
class PolicyObjective:
    """What the policy loss computes. The defaults are CTPO's. Raises ConfigError with all values that make no loss.

    ratio: what log r_t sums (`objective/ratios.py`).
    clip: "log_power" bounds log r_t by -low t^power, +high t^power; "ratio" bounds r_t by 1 - low, 1 + high.
    clip_dual: upper bound for negative advantages: of log r_t, times t^power, or of r_t itself for "ratio".
        None, or any negative number, switches it off.
    clip_power: exponent of the position t; 0 gives fixed bounds; unused by "ratio".
    aggregation: how token losses become one number (`objective/aggregation.py`).
    count_masked_sequences: whether a sequence without any loss token counts in the mean over sequences.
    token_normalizer: constant L that "sequence_sum" divides by besides the number of sequences (tokens).
    """

    ratio: RatioKind = "cumulative"
    clip: ClipKind = "log_power"
    clip_low: float = 0.025
    clip_high: float = 0.05
    clip_dual: float | None = 0.05
    clip_power: float = 0.5
    aggregation: AggregationKind = "sequence_mean"
    count_masked_sequences: bool = True
    token_normalizer: float = 1.0

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ConfigError(problems)
        if self.clip_dual is not None and self.clip_dual < 0:
            object.__setattr__(self, "clip_dual", None)

    def _problems(self) -> Iterator[Problem]:
        for name, kinds in (("ratio", RatioKind), ("clip", ClipKind), ("aggregation", AggregationKind)):
            if getattr(self, name) not in get_args(kinds):
                yield self._problem(name, *_unknown(str(getattr(self, name)), get_args(kinds)))
        for name in ("clip_low", "clip_high", "clip_dual", "clip_power", "token_normalizer"):
            value = getattr(self, name)
            if value is None and name == "clip_dual":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                yield self._problem(name, "expected a finite number")
            elif name in ("clip_low", "clip_high") and value < 0:
                yield self._problem(name, "must not be negative")
            elif name == "clip_low" and self.clip == "ratio" and value > 1:
                message = "with clip: ratio the lower bound is 1 - clip_low, and a ratio is never negative"
                yield self._problem(name, message, "set at most 1")
            elif name == "clip_dual" and self.clip == "ratio" and 0 <= value <= 1:
                message = "with clip: ratio it bounds the ratio itself and must exceed 1"
                yield self._problem(name, message, "3 is usual, a negative number switches it off")
            elif name == "token_normalizer" and value <= 0:
                yield self._problem(name, "must be positive")

    def _problem(self, name: str, message: str, fix: str = "") -> Problem:
        return Problem(f"objective.{name}", message, fix, getattr(self, name))

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> PolicyObjective:
        """The objective called `name`, with single fields overridden.

        Raises ConfigError for unknown presets and fields (naming the nearest known one) and for invalid values.
        """
        if name not in PRESETS:
            raise ConfigError([Problem("objective.preset", *_unknown(name, PRESETS), name)])
        known = [field.name for field in fields(cls)]
        unknown = [key for key in overrides if key not in known]
        if unknown:
            raise ConfigError([Problem(f"objective.{key}", *_unknown(key, known), overrides[key]) for key in unknown])
        return cls(**{**PRESETS[name], **overrides})


_PPO: dict[str, Any] = {"ratio": "token", "clip": "ratio", "clip_low": 0.2, "clip_high": 0.2, "clip_dual": 3.0}

PRESETS: dict[str, dict[str, Any]] = {
    "ctpo": {},
    "ctpo-fixed": {"clip_power": 0.0},
    "ctpo-geomean": {"ratio": "geomean", "clip_power": -0.5},
    "grpo": _PPO,
    "dapo": {**_PPO, "clip_high": 0.28, "aggregation": "token_mean"},
    "gspo": {"ratio": "sequence_geomean", "clip": "ratio", "clip_low": 3e-4, "clip_high": 4e-4, "clip_dual": None},
    # PPO's bounds on the product over the whole sequence: the high-variance end of the comparison.
    "sequence": {**_PPO, "ratio": "sequence"},
}
"""Preset name -> fields that differ from the defaults of `PolicyObjective`."""


def objective_from_config(config: ObjectiveConfig) -> PolicyObjective:
    """The objective a configuration asks for: its preset, with every field that is not null taking over.

    `anchor` and `advantage` of the configuration choose inputs of the loss and are not part of it. Raises ConfigError.
    """
    known = {field.name for field in fields(PolicyObjective)}
    overrides = {k: v for k, v in config.model_dump().items() if k in known and v is not None}
    return PolicyObjective.preset(config.preset, **overrides)


def _unknown(name: str, known: Iterable[str]) -> tuple[str, str]:
    """Message and remedy for an unknown name: the nearest known one first, then all."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f"unknown {name!r}", f"did you mean {near[0]!r}? Known: {', '.join(known)}"
