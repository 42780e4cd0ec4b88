"""The ratio of the objective: what it is, its points over the tokens of a trajectory, its chart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ctpo_megatron.report.charts import Axis, Chart, Curve, Spec, curves, for_page, kept
from ctpo_megatron.report.run_data import RunData
from ctpo_megatron.tracking import Record


@dataclass(frozen=True)
class RatioQuantity:
    """The ratio r of an objective, and log r, which dumps have as `log_ratio`.

    symbol: of r, for an axis. name: of log r, in a few words. meaning: of log r at each token, for a caption.
    """

    symbol: str
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


_UNKNOWN = RatioQuantity("r", "log-ratio", "The objective's own log-ratio")
_TURN_END = RatioQuantity(
    "r = exp S at the end of the turn",
    "log-ratio at the end of the turn",
    "Cumulative log-ratio at the end of the turn, the same for each of its tokens",
)
_QUANTITIES = {
    "cumprod": RatioQuantity(
        "r = exp S_t",
        "cumulative log-ratio",
        "Cumulative log-ratio: the sum of all tokens up to each",
    ),
    "geomean": RatioQuantity(
        "r = exp(S_t / t)",
        "mean log-ratio so far",
        "Cumulative log-ratio divided by the position of the token",
    ),
    "token": RatioQuantity("r = exp d_t", "token log-ratio", "Log-ratio of each single token"),
    "sequence": RatioQuantity(
        "r = exp S_T",
        "sequence log-ratio",
        "Log-ratio of the whole sequence, the same for each of its tokens",
    ),
    "sequence-geomean": RatioQuantity(
        "r = exp(S_T / T)",
        "sequence log-ratio per token",
        "Log-ratio of the whole sequence divided by its length, the same for each of its tokens",
    ),
}


def ratio_name(run: RunData) -> RatioQuantity:
    """Of the metrics `pg_update/is_ratio/*`: of a user's function the ratio of the token, which is recorded for it."""
    if run.setting("objective.function"):
        return _QUANTITIES["token"]
    return RatioQuantity.of({"preset": "ctpo"} | (run.setting("objective") or {}))


WINDOW = ("log_ratio", "clip_low", "clip_high")
"""Fields of a record: the ratio of the objective, and its window."""

Point = tuple[int, float, float | None, float | None]
"""Number of the model token from 1, log-ratio, and the window; None: no bound."""


def ratio_points(record: Record) -> list[Point] | None:
    """Return the curve over the model tokens, thinned so that peaks are kept; None without the data.

    `log_ratio`, `clip_low` and `clip_high` are per-token lists of the dump (see `write_trajectories`).
    """
    size = len(record["token_ids"])
    if any(len(record.get(name) or ()) != size for name in WINDOW):
        return None
    by_model = [index for index in range(size) if record["response_mask"][index]]
    numbers = {index: number for number, index in enumerate(by_model, start=1)}
    values = record["log_ratio"]
    if len(by_model) < 2 or not all(values[index] is not None and math.isfinite(values[index]) for index in by_model):
        return None
    lows, highs = record["clip_low"], record["clip_high"]
    return [
        (numbers[index], _rounded(values[index]), _bound(lows[index]), _bound(highs[index]))
        for index in map(by_model.__getitem__, kept([values[index] for index in by_model]))
    ]


def ratio_spec(quantity: RatioQuantity) -> Spec:
    """Return the chart of any trajectory, without data.

    Rows have x, y, low, high, and `outside` for a clipped ratio.
    """
    example = Curve(quantity.name, [1, 2], [0.0, 0.0], low=[-1.0, -1.0], high=[1.0, 1.0])
    spec = curves([example], Axis("model token", whole=True), Axis(f"{quantity.name} (nats)"))
    for layer in spec["layer"]:
        layer["mark"].pop("point", None)  # of every token they would hide the line
    red = {"value": "var(--red)"}
    there = {"y": {"field": "y", "type": "quantitative"}, "color": red}
    outside = {"mark": {"type": "point", "filled": True}, "encoding": there, "transform": [{"filter": "datum.outside"}]}
    spec |= {"height": 140, "layer": [*spec["layer"], outside]}
    return for_page(Chart("ratio", quantity.name, quantity.meaning, spec)) | {"data": {"values": []}, "transform": []}


def _bound(value: float | None) -> float | None:
    return _rounded(value) if value is not None and math.isfinite(value) else None


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
