"""An objective combines ratio, clip and aggregation; a preset is a named combination with its published numbers."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, get_args

from ctpo_kernels.names import CLIP_MODES, LOSS_AGG_MODES, RATIO_MODES, LossAggMode, RatioMode
from ctpo_megatron.config.objective_schema import PRESETS, WITHOUT_STD, AdvantageConfig, ClipMode, ObjectiveConfig
from ctpo_megatron.config.problems import ConfigError, Problem

_MODES = {"ratio_mode": RATIO_MODES, "clip_mode": get_args(ClipMode), "loss_agg_mode": LOSS_AGG_MODES}


@dataclass(frozen=True)
class PolicyObjective:
    """Parameters of the policy loss. The defaults are CTPO's. Raises ConfigError listing all invalid values.

    ratio_mode: the sum that log r_t is (`objective/ratios.py`).
    clip_mode: "log_power" bounds log r_t by -low t^power, +high t^power. With "ratio", r_t is bounded by 1 - low and
        1 + high. So it is with "detached_ratio"; there the bounded ratio is a constant factor of the log-prob (CISPO).
    clip_c: upper bound (dual clip) for negative advantages: of log r_t, times t^power, or of r_t itself for "ratio".
        None or a negative number: off; "detached_ratio" has none.
    clip_power: exponent of the position t; 0 gives fixed bounds; used by "log_power" only.
    loss_agg_mode: how token losses are aggregated (`objective/aggregation.py`).
    count_masked_sequences: whether a sequence without any loss token counts in the mean over sequences.
    loss_scale_factor: constant L that "seq-mean-token-sum" divides by, in addition to the number of sequences (tokens).
    """

    ratio_mode: RatioMode = "cumprod"
    clip_mode: ClipMode = "log_power"
    clip_low: float = 0.025
    clip_high: float = 0.05
    clip_c: float | None = 0.05
    clip_power: float = 0.5
    loss_agg_mode: LossAggMode = "seq-mean-token-mean"
    count_masked_sequences: bool = True
    loss_scale_factor: float = 1.0

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
        for name in ("clip_low", "clip_high", "clip_c", "clip_power", "loss_scale_factor"):
            value = getattr(self, name)
            if value is None and name == "clip_c":
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                yield self._problem(name, "expected a finite number")
            elif name in ("clip_low", "clip_high") and value < 0:
                yield self._problem(name, "must not be negative")
            elif name == "clip_low" and self.clip_mode != "log_power" and value > 1:
                message = f"with clip_mode: {self.clip_mode} the lower bound is 1 - clip_low; a ratio is never negative"
                yield self._problem(name, message, "set at most 1")
            elif name == "clip_c" and self.clip_mode == "ratio" and 0 <= value <= 1:
                message = "with clip_mode: ratio it bounds the ratio itself and must exceed 1"
                yield self._problem(name, message, "3 is usual, a negative number switches it off")
            elif name == "clip_c" and self.clip_mode == "detached_ratio" and value >= 0:
                yield self._problem(
                    name, "clip_mode: detached_ratio has no dual bound", "set -1, which switches it off"
                )
            elif name == "loss_scale_factor" and value <= 0:
                yield self._problem(name, "must be positive")

    @property
    def on_kernels(self) -> bool:
        """Whether `ctpo_kernels` can compute it; else plain torch does, from given log-probs."""
        return self.clip_mode in CLIP_MODES

    @property
    def whole_sequences(self) -> bool:
        """Whether a token's share of the loss depends on other tokens of its sequence."""
        return self.ratio_mode != "token" or self.loss_agg_mode == "seq-mean-token-mean"

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

    `anchor` and `advantage` of the configuration select inputs of the loss and are not part of it. Raises ConfigError.
    """
    known = {field.name for field in fields(PolicyObjective)}
    overrides = {k: v for k, v in config.model_dump().items() if k in known and v is not None}
    return PolicyObjective.preset(config.preset, **overrides)


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
