"""What the importance ratio of a run is: captions name the quantity of the objective that ran."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ctpo_megatron.report.run_data import RunData


@dataclass(frozen=True)
class RatioQuantity:
    """The ratio r of an objective, and log r, which dumps have as `log_ratio`.

    symbol: of r, for an axis. words: what log r is, within a sentence. name: of log r, in a few words. meaning: of
    log r at each token, for a caption.
    """

    symbol: str
    words: str
    name: str
    meaning: str

    @classmethod
    def of(cls, objective: Any) -> RatioQuantity:
        """By the section `objective` of a run's configuration, in which a preset may decide.

        `objective.token_ratios` has the formulas. With a user's `objective.function` too, dumps have what `ratio_mode`
        says.
        """
        from ctpo_megatron.config import PRESETS, PolicyObjective  # pydantic, which the metrics file does without

        settings = objective if isinstance(objective, dict) else {}
        if settings.get("turn_ratio") == "turn-end":
            return _TURN_END
        preset = PRESETS.get(str(settings.get("preset")))
        default = None if preset is None else preset.get("ratio_mode", PolicyObjective.ratio_mode)
        return _QUANTITIES.get(str(settings.get("ratio_mode") or default), _UNKNOWN)


_UNKNOWN = RatioQuantity("r", "the objective's own log-ratio", "log-ratio", "The objective's own log-ratio")
_TURN_END = RatioQuantity(
    "r = exp S at the end of the turn",
    "the log-ratios of all model tokens up to the end of the token's turn added up",
    "log-ratio at the end of the turn",
    "Cumulative log-ratio at the end of the turn, the same for each of its tokens",
)
_QUANTITIES = {
    "cumprod": RatioQuantity(
        "r = exp S_t",
        "the log-ratios of all model tokens up to t added up",
        "cumulative log-ratio",
        "Cumulative log-ratio: the sum of all tokens up to each",
    ),
    "geomean": RatioQuantity(
        "r = exp(S_t / t)",
        "the mean log-ratio of the model tokens up to t",
        "mean log-ratio so far",
        "Cumulative log-ratio divided by the position of the token",
    ),
    "token": RatioQuantity(
        "r = exp d_t", "the log-ratio of the token alone", "token log-ratio", "Log-ratio of each single token"
    ),
    "sequence": RatioQuantity(
        "r = exp S_T",
        "the log-ratios of the whole response added up",
        "sequence log-ratio",
        "Log-ratio of the whole sequence, the same for each of its tokens",
    ),
    "sequence-geomean": RatioQuantity(
        "r = exp(S_T / T)",
        "the mean log-ratio of the whole response",
        "sequence log-ratio per token",
        "Log-ratio of the whole sequence divided by its length, the same for each of its tokens",
    ),
}


def ratio_name(run: RunData) -> RatioQuantity:
    """Of the metrics `pg_update/is_ratio/*`: of a user's function the ratio of the token, which is recorded for it."""
    if run.setting("objective.function"):
        return _QUANTITIES["token"]
    return RatioQuantity.of({"preset": "ctpo"} | (run.setting("objective") or {}))
