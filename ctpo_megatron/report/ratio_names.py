"""What the importance ratio of a run is: captions name the quantity of the objective that ran."""

from __future__ import annotations

from dataclasses import dataclass

from ctpo_megatron.report.run_data import RunData


@dataclass(frozen=True)
class RatioName:
    """symbol: short, for an axis. words: what log r_t is, for a caption."""

    symbol: str
    words: str

    @property
    def log_ratio(self) -> str:
        """The same for its logarithm."""
        return f"log r, {self.words}"


_NAMES = {
    "cumprod": RatioName("r = exp S_t", "the log-ratios of all model tokens up to t added up"),
    "geomean": RatioName("r = exp(S_t / t)", "the mean log-ratio of the model tokens up to t"),
    "token": RatioName("r = exp d_t", "the log-ratio of the token alone"),
    "sequence": RatioName("r = exp S_T", "the log-ratios of the whole response added up"),
    "sequence-geomean": RatioName("r = exp(S_T / T)", "the mean log-ratio of the whole response"),
}


def ratio_name(run: RunData) -> RatioName:
    """Of the objective in the configuration; of a user's function the ratio of the token, which is recorded for it."""
    from ctpo_megatron.config import PRESETS, PolicyObjective  # pydantic, which the metrics file does without

    if run.setting("objective.function"):
        return _NAMES["token"]
    preset = PRESETS.get(run.setting("objective.preset", "ctpo"), {})
    mode = run.setting("objective.ratio_mode") or preset.get("ratio_mode") or PolicyObjective().ratio_mode
    return _NAMES.get(mode, RatioName("r", f"ratio_mode {mode}"))
