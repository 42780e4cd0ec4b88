"""An objective combines ratio, clip and aggregation; a preset is a named combination with its published numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from ctpo_megatron.config.objective_schema import (
    CLIP_MODES,
    EPSILON_OF,
    PRESETS,
    STD_EPSILON,
    WITHOUT_STD,
    AdvantageConfig,
    AggregationName,
    ClipMode,
    ObjectiveConfig,
    PrefixBudget,
    RatioName,
    TurnRatio,
)
from ctpo_megatron.config.problems import ConfigError, Problem

WITHOUT_DUAL = ("detached_ratio", "sigmoid", "token_log", "prefix_tv")
"""Clip modes without a use for `clip_c`."""
ONLY_WITH = {"tau_positive": "sigmoid", "tau_negative": "sigmoid"} | dict.fromkeys(
    ("prefix_weight", "prefix_budget"), "prefix_tv"
)
"""Field -> the one clip mode that uses it."""


@dataclass(frozen=True)
class PolicyObjective:
    """Parameters of the policy loss. The defaults are CTPO's. Raises ConfigError with all contradictions.

    ratio_mode: the sum that log r_t is (`objective/ratios.py`).
    clip_mode: what limits the update of a token (`objective/surrogate.py`). "log_power" bounds log r_t by -low t^power,
        +high t^power. With "ratio", r_t is bounded by 1 - low and 1 + high. So it is with "detached_ratio"; there the
        bounded ratio is a constant factor of the log-prob (CISPO).
    clip_c: upper bound (dual clip) for negative advantages: of log r_t, times t^power, or of r_t itself for "ratio".
        With "binary_tv" and "binary_kl" r_t is truncated at it, with "sequence_k3" it bounds the largest k3 of a
        sequence. None or a negative number: off; the other modes have none.
    clip_power: exponent of the position t; 0 gives fixed bounds; used by "log_power" only.
    tau_positive, tau_negative: steepness of the gate by the sign of the advantage; used by "sigmoid" only.
    prefix_weight, prefix_budget: `objective/surrogate.py` has their formula; used by "prefix_tv" only.
    loss_agg_mode: how token losses are aggregated (`objective/aggregation.py`).
    count_masked_sequences: whether a sequence without any loss token counts in the mean over sequences.
    loss_scale_factor: constant L that "seq-mean-token-sum" divides by, in addition to the number of sequences (tokens).
    clip_drift: s2, variance of a token's log-ratio (nats^2): the "log_power" window is centred on -t s2 / 2, to where
        noise alone takes the cumulative ratio. 0 centres it on 0.
    entropy_coef: subtracted from the loss times the entropy of the loss tokens, aggregated as the loss is.
    turn_ratio: "turn-end" has one term for each turn that ends at the token or after it (`objective/ratios.py`), with
        the ratio and the bounds at its end. It needs "cumprod", and bounds on that ratio or its logarithm.
    on_kernels: whether `ctpo_kernels` can compute it; else plain torch does, from given log-probs.
    is_prefix_ratio: whether log r_t is S_t, the sum over the prefix up to the token.
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
    on_kernels: bool = field(init=False, repr=False)
    is_prefix_ratio: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ConfigError(problems)
        if self.clip_c is not None and self.clip_c < 0:
            object.__setattr__(self, "clip_c", None)
        of_prefix = self.turn_ratio == "prefix"
        on_kernels = self.clip_mode in CLIP_MODES and not self.clip_drift and of_prefix
        object.__setattr__(self, "on_kernels", on_kernels)
        object.__setattr__(self, "is_prefix_ratio", of_prefix and self.ratio_mode == "cumprod")

    def _problems(self) -> Iterator[Problem]:
        """What the fields contradict in each other; the schema refuses values that are wrong alone."""
        ratio, dual = self.clip_mode in ("ratio", "detached_ratio"), self.clip_c
        if ratio and self.clip_low > 1:
            message = f"with clip_mode: {self.clip_mode} the lower bound is 1 - clip_low; a ratio is never negative"
            yield self._problem("clip_low", message, "set at most 1")
        if dual is not None and dual >= 0:
            yield from self._dual_problems(dual)
        if self.clip_drift and (self.clip_mode, self.ratio_mode) != ("log_power", "cumprod"):
            message = f"with {self.clip_mode} of {self.ratio_mode}: only the sum of all log-ratios drifts so"
            yield self._problem("clip_drift", message, "set 0, or clip_mode: log_power with ratio_mode: cumprod")
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

    def _problem(self, name: str, message: str, fix: str = "") -> Problem:
        return Problem(f"objective.{name}", message, fix, getattr(self, name))

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> PolicyObjective:
        """Return the objective called `name`, with single fields overridden. Raises ConfigError for a contradiction."""
        return cls(**{**PRESETS[name], **overrides})


def objective_from_config(config: ObjectiveConfig) -> PolicyObjective:
    """Return the configured objective: the preset, overridden by every field that is not null.

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
    """Return the configured advantages; what is null in them is the preset's."""
    of_preset = {
        "normalize_std": config.preset not in WITHOUT_STD,
        "epsilon": EPSILON_OF.get(config.preset, STD_EPSILON),
    }
    unset = {name: value for name, value in of_preset.items() if getattr(config.advantage, name) is None}
    return config.advantage.model_copy(update=unset)
