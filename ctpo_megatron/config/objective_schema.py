"""The sections of `objective`, and the presets: named objectives with their published numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from ctpo_megatron.config.extension import Extension
from ctpo_megatron.config.section import Section

# As `ctpo_kernels` has them, which a login node lacks; a test compares the two.
RatioName = Literal["cumprod", "geomean", "token", "sequence", "sequence-geomean"]
AggregationName = Literal["seq-mean-token-mean", "token-mean", "seq-mean-token-sum"]
CLIP_MODES = ("log_power", "ratio", "detached_ratio")
"""Clip modes of the kernels; the torch form has more."""


class PrefixBudget(BaseModel):
    """Divergence that a prefix may spend on each of its tokens. In YAML a number or `{quantile: ..., min: ...}`.

    quantile: of the divergences of the sequence's tokens; None: only `min` counts. min: the budget is at least this.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    quantile: float | None = Field(default=None, gt=0, lt=1)
    min: NonNegativeFloat

    @model_validator(mode="before")
    @classmethod
    def _from_number(cls, value: Any) -> Any:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return {"min": value}
        if isinstance(value, PrefixBudget) or (isinstance(value, dict) and value.keys() == cls.model_fields.keys()):
            return value
        raise PydanticCustomError("prefix_budget", "must be a number, or {quantile: ..., min: ...}")

    @model_serializer
    def plain(self) -> float | dict[str, float]:
        """Return it as a configuration has it."""
        return self.min if self.quantile is None else {"quantile": self.quantile, "min": self.min}


_PPO: dict[str, Any] = {"ratio_mode": "token", "clip_mode": "ratio", "clip_low": 0.2, "clip_high": 0.2, "clip_c": 3.0}

_DPPO: dict[str, Any] = {"ratio_mode": "token", "clip_c": 20.0, "loss_agg_mode": "token-mean"}

_CPPO: dict[str, Any] = {
    "ratio_mode": "token",
    "clip_mode": "prefix_tv",
    "clip_low": 0.15,
    "clip_high": 0.15,
    "clip_c": None,
    "loss_agg_mode": "token-mean",
}

PRESETS: dict[str, dict[str, Any]] = {
    # As in the authors' code; the objective in the paper has no dual bound.
    "ctpo": {},
    "ctpo-paper": {"clip_c": None},
    "ctpo-uniform": {"clip_power": 0.0},
    # The ablation with the ratio window [0.5, 5] of the paper's first figure. That it had no dual bound is inferred.
    "ctpo-fixed": {"clip_mode": "ratio", "clip_low": 0.5, "clip_high": 4.0, "clip_c": None},
    # Ours: around the drift of noise with the paper's sigma at step 100, .0387.
    "ctpo-drift": {"clip_drift": 0.0015},
    "ctpo-geomean": {"ratio_mode": "geomean", "clip_power": -0.5},
    # Ours, with the limit of `cispo`.
    "ctpo-weight": {"clip_mode": "detached_ratio", "clip_low": 1.0, "clip_high": 4.0, "clip_c": None},
    "grpo": _PPO,
    "dr-grpo": {**_PPO, "clip_c": None, "loss_agg_mode": "seq-mean-token-sum"},
    "dapo": {**_PPO, "clip_high": 0.28, "loss_agg_mode": "token-mean"},
    # What TRL and verl mean by these names with their defaults; `config/load.py` fills in the divisor of dr-grpo-trl.
    "grpo-trl": {**_PPO, "clip_c": None},
    "dapo-trl": {**_PPO, "clip_c": None, "loss_agg_mode": "token-mean"},
    "dr-grpo-trl": {**_PPO, "clip_c": None, "loss_agg_mode": "seq-mean-token-sum"},
    "grpo-verl": {**_PPO, "loss_agg_mode": "token-mean"},
    "gspo": {
        "ratio_mode": "sequence-geomean",
        "clip_mode": "ratio",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "clip_c": None,
    },
    # No lower bound, as published. The upper bound was not published; others found a ratio of 5 to work.
    "cispo": {
        "ratio_mode": "token",
        "clip_mode": "detached_ratio",
        "clip_low": 1.0,
        "clip_high": 4.0,
        "clip_c": None,
        "loss_agg_mode": "token-mean",
    },
    # As in the authors' code: verl and TRL have the same temperatures.
    "sapo": {"ratio_mode": "token", "clip_mode": "sigmoid", "clip_c": None},
    "gmpo": {
        "ratio_mode": "sequence-geomean",
        "clip_mode": "token_log",
        "clip_low": 0.4,
        "clip_high": 0.4,
        "clip_c": None,
    },
    "dppo-tv": {**_DPPO, "clip_mode": "binary_tv", "clip_low": 0.15, "clip_high": 0.15},
    "dppo-kl": {**_DPPO, "clip_mode": "binary_kl", "clip_low": 0.05, "clip_high": 0.05},
    # The fixed budget is the authors' for a post-trained model, the quantile theirs for base models.
    "cppo": _CPPO,
    "cppo-base": {**_CPPO, "prefix_budget": PrefixBudget(quantile=0.9, min=0.02)},
    # Mean and largest estimate together; the thresholds are those with which CPPO's authors ran it.
    "trm-k3": {
        "ratio_mode": "token",
        "clip_mode": "sequence_k3",
        "clip_high": 0.002,
        "clip_c": 0.1,
        "loss_agg_mode": "token-mean",
    },
    # PPO's bounds on the product over the whole sequence: the high-variance end of the comparison.
    "sequence": {**_PPO, "ratio_mode": "sequence"},
}
"""Preset name -> fields that differ from the defaults of `PolicyObjective`."""

WITHOUT_STD = frozenset({"dr-grpo"})
"""Presets whose advantages are not divided by the standard deviation of the group, unless the configuration says so."""

STD_EPSILON = 1e-6
"""What is added to that standard deviation, unless the preset or the configuration says otherwise."""
EPSILON_OF = dict.fromkeys(("grpo-trl", "dapo-trl", "dr-grpo-trl"), 1e-4)
"""Preset -> what it adds to the standard deviation instead."""
BY_LONGEST_RESPONSE = frozenset({"dr-grpo-trl"})
"""Presets that divide by `rollout.max_response_tokens`, unless the configuration says otherwise."""

ClipMode = Literal[
    "log_power",
    "ratio",
    "detached_ratio",
    "sigmoid",
    "token_log",
    "binary_tv",
    "binary_kl",
    "prefix_tv",
    "sequence_k3",
]
"""The clip modes of the kernels, and those that need given log-probs (`objective/surrogate.py`)."""

TurnRatio = Literal["prefix", "turn-end"]
"""Which prefix the ratio of a turn's reward is of: up to the token, or up to the end of the turn that earned it."""

if TYPE_CHECKING:
    PresetName = str
else:
    PresetName = Literal[tuple(PRESETS)]  # opaque to a type checker, but not to pydantic and the key table


class AdvantageConfig(Section):
    """Outcome reward -> advantage, over the samples of one prompt (algorithm section 5)."""

    kind: Literal["group", "rloo", "mean_baseline"] = Field(
        default="group",
        description="baseline: mean of the prompt's samples, of its other samples, or of the whole batch",
    )
    normalize_std: bool | None = Field(
        default=None,
        description="divide by the group's unbiased standard deviation (group only); null: the preset's, "
        "false for dr-grpo, else true",
    )
    epsilon: PositiveFloat | None = Field(
        default=None,
        description="added to that standard deviation; null: the preset's, 1e-4 for TRL's, else 1e-6",
    )


class RejectConfig(Section):
    """Rejection of tokens, or whole sequences, where sampler and trainer differ too much.

    With d = log-prob of the trainer (at the start of the batch) minus log-prob of the sampler, in nats per token.
    """

    stat: Literal["k1", "k2", "k3"] = Field(description="k1: -d; k2: d^2 / 2; k3: exp(d) - 1 - d")
    over: Literal["token", "sequence_sum", "sequence_mean", "sequence_max"] = Field(
        description="what is compared and rejected: a token, or a sequence by the sum, mean or largest of its tokens"
    )
    low: float | None = Field(
        default=None, description="smallest accepted value (k1 only: the others are not negative)"
    )
    high: float | None = Field(default=None, description="largest accepted value")


class CorrectionConfig(Section):
    """Correction of the difference between sampler and trainer at the start of a batch."""

    level: Literal["none", "token", "sequence", "prefix"] = Field(
        default="none",
        description="weight of a token's loss, trainer over sampler: its own ratio, the product over its sequence, or "
        "the product up to it; needs `anchor: decoupled`",
    )
    cap: PositiveFloat = Field(default=5.0, description="largest weight; larger ones are truncated")
    normalize: bool = Field(
        default=False, description="divide the weights by their mean over the batch (sequence: over its sequences)"
    )
    reject: tuple[RejectConfig, ...] = Field(
        default=(), description="rejection rules, of which any one suffices; the ratios of other tokens do not change"
    )
    veto: float | None = Field(
        default=None, gt=0, lt=1, description="a token whose ratio trainer / sampler is below it removes its sequence"
    )

    @property
    def rejects(self) -> bool:
        """Whether anything can be rejected."""
        return bool(self.reject) or self.veto is not None


class ObjectiveConfig(Section):
    """The policy loss: a preset, and any field of it overridden (null keeps the preset's value)."""

    preset: PresetName = Field(default="ctpo", description="named objective whose fields the keys below override")
    anchor: Literal["proximal", "behaviour", "decoupled"] = Field(
        default="proximal",
        description="ratio against log-probs recomputed by the trainer, or as the sampler reported them; decoupled: "
        "the former, times the weight of `correction`. With rollout.max_staleness > 0 the default is behaviour, "
        "which is exact for tokens that earlier weights sampled",
    )
    credit: Literal["outcome", "turn"] = Field(
        default="outcome",
        description="what a token is credited with: the reward of its trajectory, or what its turn and the later ones "
        "earned (`Reward(turns=[...])`)",
    )
    turn_ratio: TurnRatio | None = Field(
        default=None,
        description="importance ratio of a turn's reward with `credit: turn` at the token, by `ratio_mode` (null), "
        "or of the prefix up to the end of the turn that earned it. The latter alone is unbiased",
    )
    advantage: AdvantageConfig = AdvantageConfig()
    correction: CorrectionConfig = CorrectionConfig()
    function: Extension | None = Field(
        default=None, description="a user's objective, package.module:Name, instead of the preset's ratio and clip"
    )
    ratio_mode: RatioName | None = Field(default=None, description="importance ratio of a token")
    clip_mode: ClipMode | None = Field(
        default=None,
        description="what limits an update: bounds on log r that grow with the position, on r, or on a constant r that "
        "multiplies the log-prob (CISPO). Further: a sigmoid of r (SAPO); bounds on each token of a mean (GMPO); a "
        "divergence beyond which tokens (DPPO, CPPO) or sequences (TRM) leave the loss",
    )
    clip_low: NonNegativeFloat | None = Field(
        default=None, description="lower clip width; for binary_tv, binary_kl, prefix_tv the threshold where A < 0"
    )
    clip_high: NonNegativeFloat | None = Field(
        default=None,
        description="upper clip width; for binary_tv, binary_kl, prefix_tv the threshold where A > 0; for sequence_k3 "
        "of the mean",
    )
    clip_c: float | None = Field(
        default=None,
        description="dual-clip bound; for binary_tv, binary_kl the largest r, for sequence_k3 the largest k3 of a "
        "token; a negative number switches it off",
    )
    clip_power: float | None = Field(default=None, description="window grows as position ** power (log_power only)")
    clip_drift: NonNegativeFloat | None = Field(
        default=None,
        description="variance of a token's log-ratio, nats^2, such as sigma^2 of the report. It centres the window on "
        "-position * clip_drift / 2, where noise takes a cumulative ratio (log_power only); null: 0",
    )
    tau_positive: PositiveFloat | None = Field(
        default=None, description="steepness of the sigmoid where A > 0 (sigmoid only)"
    )
    tau_negative: PositiveFloat | None = Field(
        default=None, description="steepness of the sigmoid where A < 0 (sigmoid only)"
    )
    prefix_weight: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="weight of the divergence at the last token, falling to it from 1 at the first (prefix_tv only)",
    )
    prefix_budget: PrefixBudget | None = Field(
        default=None,
        description="divergence that a prefix may spend on each of its tokens: a number, or a quantile of the "
        "divergences of its sequence, but at least `min` (prefix_tv only)",
    )
    loss_agg_mode: AggregationName | None = Field(default=None, description="how token losses become one loss")
    loss_scale_factor: PositiveFloat | None = Field(
        default=None,
        description="constant that seq-mean-token-sum divides by; null: the preset's, "
        "rollout.max_response_tokens for dr-grpo-trl, else 1",
    )
    entropy_coef: NonNegativeFloat | None = Field(
        default=None,
        description="entropy bonus: subtracted from the loss times the policy's entropy (nats), aggregated as the loss "
        "is; null: 0",
    )
    count_masked_sequences: bool | None = Field(
        default=None, description="fully masked sequences count in the denominator"
    )

    @property
    def by_turn(self) -> bool:
        """Whether the rewards of turns are trained on."""
        return self.credit == "turn"

    @property
    def needs_zero_advantage(self) -> bool:
        """Whether a step without the trajectories of advantage 0 would be another.

        A user's objective may learn from them, an entropy bonus does, and a correction counts their remaining tokens or
        weights.
        """
        learns = self.function is not None or bool(self.entropy_coef)
        return learns or self.correction.rejects or self.correction.normalize
