"""An objective combines ratio, clip and aggregation; a preset is a named combination with its published numbers."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, get_args

from ctpo_megatron.config.kernel_choices import CLIP_MODES, LOSS_AGG_MODES, RATIO_MODES, AggregationName, RatioName
from ctpo_megatron.config.objective_schema import (
    PRESETS,
    WITHOUT_STD,
    AdvantageConfig,
    ClipMode,
    ObjectiveConfig,
    PrefixBudget,
    TurnRatio,
)
from ctpo_megatron.config.problems import ConfigError, Problem

_MODES = {
    "ratio_mode": RATIO_MODES,
    "clip_mode": get_args(ClipMode),
    "loss_agg_mode": LOSS_AGG_MODES,
    "turn_ratio": get_args(TurnRatio),
}

_NUMBERS = (
    "clip_low",
    "clip_high",
    "clip_c",
    "clip_power",
    "loss_scale_factor",
    "tau_positive",
    "tau_negative",
    "prefix_weight",
    "prefix_budget",
    "entropy_coef",
    "clip_drift",
)
WITHOUT_DUAL = ("detached_ratio", "sigmoid", "token_log", "prefix_tv")
"""Clip modes without a use for `clip_c`."""
ONLY_WITH = {"tau_positive": "sigmoid", "tau_negative": "sigmoid"} | dict.fromkeys(
    ("prefix_weight", "prefix_budget"), "prefix_tv"
)
"""Field -> the one clip mode that uses it."""


@dataclass(frozen=True)
class PolicyObjective:
    """Parameters of the policy loss. The defaults are CTPO's. Raises ConfigError listing all invalid values.

    ratio_mode: the sum that log r_t is (`objective/ratios.py`).
    clip_mode: what limits the update of a token (`objective/surrogate.py`). "log_power" bounds log r_t by -low t^power,
        +high t^power. With "ratio", r_t is bounded by 1 - low and 1 + high. So it is with "detached_ratio"; there the
        bounded ratio is a constant factor of the log-prob (CISPO).
    clip_c: upper bound (dual clip) for negative advantages: of log r_t, times t^power, or of r_t itself for "ratio".
        With "binary_tv" and "binary_kl" r_t is truncated at it, with "sequence_k3" it bounds the largest k3 of a
        sequence. None or a negative number: off; the other modes have none.
    clip_power: exponent of the position t; 0 gives fixed bounds; used by "log_power" only.
    tau_positive, tau_negative: steepness of the gate by the sign of the advantage; used by "sigmoid" only.
    prefix_weight, prefix_budget: `trust_region.outside` has their formula; used by "prefix_tv" only.
    loss_agg_mode: how token losses are aggregated (`objective/aggregation.py`).
    count_masked_sequences: whether a sequence without any loss token counts in the mean over sequences.
    loss_scale_factor: constant L that "seq-mean-token-sum" divides by, in addition to the number of sequences (tokens).
    clip_drift: s2, variance of a token's log-ratio (nats^2): the "log_power" window is centred on -t s2 / 2, to where
        noise alone takes the cumulative ratio. 0 centres it on 0.
    entropy_coef: subtracted from the loss times the entropy of the loss tokens, aggregated as the loss is.
    turn_ratio: "turn-end" has one term for each turn that ends at the token or after it (`objective/turns.py`), with
        the ratio and the bounds at its end. It needs "cumprod", and bounds on that ratio or its logarithm.
    """

    ratio_mode: RatioName = "cumprod"
    clip_mode: ClipMode = "log_power"
    clip_low: float = 0.025
    clip_high: float = 0.05
    clip_c: float | None = 0.05
    clip_power: float = 0.5
    loss_agg_mode: AggregationName = "seq-mean-token-mean"
    count_masked_sequences: bool = True
    loss_scale_factor: float = 1.0
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    prefix_weight: float = 0.8
    prefix_budget: float | PrefixBudget = 0.015
    entropy_coef: float = 0.0
    clip_drift: float = 0.0
    turn_ratio: TurnRatio = "prefix"

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ConfigError(problems)
        if self.clip_c is not None and self.clip_c < 0:
            object.__setattr__(self, "clip_c", None)

    def _problems(self) -> Iterator[Problem]:
        for name, modes in _MODES.items():
            mode = str(getattr(self, name))
            if mode not in modes:
                yield self._problem(name, *_unknown(mode, modes))
        for name in _NUMBERS:
            value = getattr(self, name)
            if (value is None and name == "clip_c") or isinstance(value, PrefixBudget):
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                yield self._problem(name, "expected a finite number")
            elif name in ("clip_low", "clip_high", "prefix_budget", "entropy_coef", "clip_drift") and value < 0:
                yield self._problem(name, "must not be negative")
            elif name == "clip_low" and self.clip_mode in ("ratio", "detached_ratio") and value > 1:
                message = f"with clip_mode: {self.clip_mode} the lower bound is 1 - clip_low; a ratio is never negative"
                yield self._problem(name, message, "set at most 1")
            elif name == "clip_c" and value >= 0:
                yield from self._dual_problems(value)
            elif name in ("loss_scale_factor", "tau_positive", "tau_negative") and value <= 0:
                yield self._problem(name, "must be positive")
            elif name == "clip_drift" and value and (self.clip_mode, self.ratio_mode) != ("log_power", "cumprod"):
                message = f"with {self.clip_mode} of {self.ratio_mode}: only the sum of all log-ratios drifts so"
                yield self._problem(name, message, "set 0, or clip_mode: log_power with ratio_mode: cumprod")
            elif name == "prefix_weight" and not 0 < value <= 1:
                yield self._problem(name, "must be above 0 and at most 1")
        if self.turn_ratio == "turn-end":
            yield from self._turn_end_problems()

    def _turn_end_problems(self) -> Iterator[Problem]:
        for name, served in (("ratio_mode", ("cumprod",)), ("clip_mode", ("log_power", "ratio"))):
            if (mode := getattr(self, name)) not in served:
                message = f"is the product of ratios up to the end of a turn, and {name} is {mode}"
                fix = f"set {name} to {' or '.join(served)}, or turn_ratio: prefix"
                yield self._problem("turn_ratio", message, fix)

    def _dual_problems(self, value: float) -> Iterator[Problem]:
        if self.clip_mode in ("ratio", "binary_tv", "binary_kl") and value <= 1:
            message = f"with clip_mode: {self.clip_mode} it bounds the ratio itself and must exceed 1"
            usual = "3" if self.clip_mode == "ratio" else "20"
            yield self._problem("clip_c", message, f"{usual} is usual, a negative number switches it off")
        elif self.clip_mode in WITHOUT_DUAL:
            message = f"clip_mode: {self.clip_mode} has no dual bound"
            yield self._problem("clip_c", message, "set -1, which switches it off")

    @property
    def on_kernels(self) -> bool:
        """Whether `ctpo_kernels` can compute it; else plain torch does, from given log-probs."""
        return self.clip_mode in CLIP_MODES and not self.clip_drift and self.turn_ratio == "prefix"

    @property
    def is_prefix_ratio(self) -> bool:
        """Whether log r_t is S_t, the sum over the prefix up to the token."""
        return self.ratio_mode == "cumprod" and self.turn_ratio == "prefix"

    def _problem(self, name: str, message: str, fix: str = "") -> Problem:
        return Problem(f"objective.{name}", message, fix, getattr(self, name))

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> PolicyObjective:
        """The objective called `name`, with single fields overridden.

        Raises ConfigError for unknown presets and fields (with the closest match) and for invalid values.
        """
        if name not in PRESETS:
            raise ConfigError([Problem("objective.preset", *_unknown(name, PRESETS), name)])
        known = [field.name for field in fields(cls)]
        unknown = [key for key in overrides if key not in known]
        if unknown:
            raise ConfigError([Problem(f"objective.{key}", *_unknown(key, known), overrides[key]) for key in unknown])
        return cls(**{**PRESETS[name], **overrides})


def objective_from_config(config: ObjectiveConfig) -> PolicyObjective:
    """The configured objective: the preset, overridden by every field that is not null.

    `anchor` and `advantage` of the configuration select inputs of the loss and are not part of it. Raises ConfigError,
    also for a field that the clip mode has no use for.
    """
    known = {field.name for field in fields(PolicyObjective)}
    overrides = {name: value for name, value in config if name in known and value is not None}
    if (budget := config.prefix_budget) is not None and budget.quantile is None:
        overrides["prefix_budget"] = budget.min
    objective = PolicyObjective.preset(config.preset, **overrides)
    unused = [name for name, mode in ONLY_WITH.items() if name in overrides and objective.clip_mode != mode]
    if unused:
        raise ConfigError([_without_effect(name, objective.clip_mode, overrides[name]) for name in unused])
    return objective


def _without_effect(name: str, mode: str, value: Any) -> Problem:
    message = f"has no effect with clip_mode: {mode}; clip_mode: {ONLY_WITH[name]} uses it"
    return Problem(f"objective.{name}", message, "remove it, or set that mode", value)


def advantage_from_config(config: ObjectiveConfig) -> AdvantageConfig:
    """The configured advantages; if `normalize_std` is null, the preset's."""
    if config.advantage.normalize_std is not None:
        return config.advantage
    return config.advantage.model_copy(update={"normalize_std": config.preset not in WITHOUT_STD})


def _unknown(name: str, known: Iterable[str]) -> tuple[str, str]:
    """Message and fix for an unknown name: the closest match, then all known names."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f"unknown {name!r}", f"did you mean {near[0]!r}? Known: {', '.join(known)}"
