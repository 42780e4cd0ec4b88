"""Statistics of a step by position t in the response: sums that merge exactly, from per-token outputs of the passes.

t counts the model tokens of a trajectory from 1, as in S_t (paper, section 3). The bins are the same for all runs, so
that files of different runs can be added and compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctpo_megatron.config import PolicyObjective
from ctpo_megatron.objective.ratios import LOG_RATIO_CAP, LossTokens, objective_ratios, prefix_sum
from ctpo_megatron.objective.sequences import SequenceBounds
from ctpo_megatron.objective.surrogate import surrogate

_SINGLE, _BINS_AN_OCTAVE, _WIDE = 16, 4, 48
BINS = _SINGLE + _WIDE
LAST_POSITIONS = (
    *range(1, _SINGLE + 1),
    *(math.floor(_SINGLE * 2 ** ((j + 1) / _BINS_AN_OCTAVE)) for j in range(_WIDE)),
)
"""Last position of each bin: 1 to 16 one by one, then four bins an octave; the last bin has all later positions."""

SIGNS = ("positive", "negative", "zero")
"""Of the advantage."""
COUNTS = (
    "n",
    "n_loss",
    "n_computed",
    "n_entropy",
    "clip_high",
    "clip_low",
    "clip_dual",
    "fixed_high",
    "fixed_low",
    "widening_high",
    "widening_low",
)
SUMS = ("t", "S", "S2", "d", "d2", "r", "r2", "x", "x2", "entropy")
COLUMNS = COUNTS + SUMS
"""What is known of the tokens of a cell, a sign and a bin; docs/reference/metrics.md defines them."""
SIDES = ("high", "low", "dual")

FIXED_WINDOW = (math.log(0.5), math.log(5.0))
"""Bounds of log r of the fixed window that the paper compares with."""
WIDENING_WINDOW = (-0.025, 0.05)
"""Bounds of log r of the paper's window, times sqrt(t)."""

_SMALLEST, _DECADES, _BINS_A_DECADE = 1e-6, 7, 64
_HALF = _DECADES * _BINS_A_DECADE
HISTOGRAM_BINS = 2 * _HALF + 1
"""Of log r: |log r| < 1e-6 in the middle, and 64 bins a decade on either side, the outer ones without an end."""


@dataclass(frozen=True)
class PositionStats:
    """Sums over tokens, float64; counts are exact to 2^53.

    cells: `[len(SIGNS), BINS, len(COLUMNS)]`. histogram: `[HISTOGRAM_BINS]`, of the objective's log r of computed loss
    tokens. shares: `[len(SIDES) + 1]`, the clipped share of the loss tokens of each trajectory, summed over
    trajectories, and the number of trajectories with loss tokens.
    """

    cells: NDArray[np.float64]
    histogram: NDArray[np.float64]
    shares: NDArray[np.float64]

    @classmethod
    def empty(cls) -> PositionStats:
        """Of no token."""
        return cls(np.zeros((len(SIGNS), BINS, len(COLUMNS))), np.zeros(HISTOGRAM_BINS), np.zeros(len(SIDES) + 1))

    def __add__(self, other: PositionStats) -> PositionStats:
        return PositionStats(self.cells + other.cells, self.histogram + other.histogram, self.shares + other.shares)

    def record(self) -> dict[str, Any]:
        """A plain-JSON form: sign -> column -> numbers by bin up to the last with a token, columns of zeros left out;
        `histogram`, bin -> count. Sums have 14 significant digits; one that is not finite is None."""
        filled = np.flatnonzero(self.column("n").any(0))
        bins = int(filled[-1]) + 1 if filled.size else 0
        found: dict[str, Any] = {
            sign: {
                name: [_plain(value, name in COUNTS) for value in cells[:bins, place].tolist()]
                for place, name in enumerate(COLUMNS)
                if cells[:, place].any()
            }
            for sign, cells in zip(SIGNS, self.cells, strict=True)
        }
        counted = np.flatnonzero(self.histogram).tolist()
        return found | {"histogram": {str(place): int(self.histogram[place]) for place in counted}}

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> PositionStats:
        """Inverse of `record`, to the digits of it, but for the shares of trajectories; None is NaN."""
        found = cls.empty()
        for sign, cells in zip(SIGNS, found.cells, strict=True):
            for name, values in record[sign].items():
                cells[: len(values), COLUMNS.index(name)] = [math.nan if value is None else value for value in values]
        for place, count in record["histogram"].items():
            found.histogram[int(place)] = count
        return found

    def unlike(self, expected: PositionStats, tolerance: float) -> str:
        """The first that differs: the histogram, a count, or a sum by more than `tolerance` of the largest in its
        column; "" for nothing. Entropy is left out where `expected` does not know it."""
        if not np.array_equal(self.histogram, expected.histogram):
            return "another histogram of log r"
        known = expected.column("n_entropy").any()
        for name in COLUMNS:
            ours, theirs = self.column(name), expected.column(name)
            allowed = 0.0 if name in COUNTS else tolerance * float(np.abs(theirs).max())
            worst = float(np.abs(ours - theirs).max())
            if not worst <= allowed and (known or "entropy" not in name):  # NaN differs from everything
                return f"{name} differs by {worst:.3g}"
        return ""

    def column(self, name: str) -> NDArray[np.float64]:
        """`[len(SIGNS), BINS]`."""
        return self.cells[:, :, COLUMNS.index(name)]


def _plain(value: float, is_count: bool) -> float | int | None:
    if is_count:
        return int(value)
    return float(f"{value:.14g}") if math.isfinite(value) else None


def bin_of(position: NDArray[np.integer[Any]]) -> NDArray[np.integer[Any]]:
    """The bin of each position, from 1."""
    return np.minimum(np.searchsorted(LAST_POSITIONS, position), BINS - 1)


@torch.no_grad()
def position_stats(
    log_probs: Tensor,
    anchor: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_mask: Tensor,
    objective: PolicyObjective | None,
    cu_seqlens: Tensor,
    entropy: Tensor | None = None,
    turn: Tensor | None = None,
) -> PositionStats:
    """Of the computed tokens of a packed batch `[N]`; arguments as for `policy_loss`.

    anchor: the denominator of the ratio (`old_log_probs` there). objective: None for a user's own, whose ratio and
    clips are unknown. entropy: nats, None where it is not known. S is the cumulative log-ratio whatever the objective's
    ratio is; x is the objective's, and not summed where that is S. Sums run over the tokens in their order, in float64
    on the host.
    """
    layout = SequenceBounds.of(log_probs, cu_seqlens)
    model, trained = layout.masks(response_mask, loss_mask)
    advantage = layout.values(advantages, "advantages", torch.float32)
    current, reference, ratios = objective_ratios(objective, log_probs, anchor, model, layout, turn, torch.float32)
    nothing = torch.zeros_like(model)
    flags, x = [nothing] * len(SIDES), torch.zeros_like(ratios.d)
    if objective is not None:
        x = ratios.log_ratio
        of_loss = torch.where(trained if ratios.ends is None else model, advantage, 0.0)
        clipped = surrogate(ratios, LossTokens(current, reference, of_loss, model, trained, layout), objective)
        flags = [clipped.high, clipped.low, clipped.dual]
    # With ratios at the ends of turns the bounds follow the gain of the turn, which is what its ratio multiplies.
    gain = advantage if ratios.ends is None else ratios.ends.at_end(ratios.ends.gain(advantage))
    numbers = [ratios.position, layout.sequence_id, gain, prefix_sum(ratios.d, layout), ratios.d, x]
    numbers += [trained, *flags, torch.zeros_like(x) if entropy is None else entropy, model]
    # One copy to the host, because each copy waits for the device; so does a selection by a mask on the device.
    on_host = torch.stack([values.double() for values in numbers]).cpu().numpy()
    table = on_host[:-1, on_host[-1] > 0]
    return _summed(table, layout.sequences, entropy is not None, objective)


def _summed(
    table: NDArray[np.float64], sequences: int, with_entropy: bool, objective: PolicyObjective | None
) -> PositionStats:
    position, sequence, gain, prefix, d, x, trained, high, low, dual, entropy = table
    sign = np.where(gain > 0, 0, np.where(gain < 0, 1, 2))
    cell = sign * BINS + bin_of(position.astype(np.int64))
    loss, up, down = trained > 0, (trained > 0) & (gain > 0), (trained > 0) & (gain < 0)
    root = np.sqrt(position)
    other = np.zeros_like(x) if objective is None or objective.is_prefix_ratio else x
    ratio = np.exp(np.minimum(prefix, LOG_RATIO_CAP))
    values: dict[str, Any] = {
        "n": None,
        "n_loss": trained,
        "n_computed": None,
        "n_entropy": np.full_like(position, with_entropy),
        "clip_high": high,
        "clip_low": low,
        "clip_dual": dual,
        "fixed_high": up & (prefix > FIXED_WINDOW[1]),
        "fixed_low": down & (prefix < FIXED_WINDOW[0]),
        "widening_high": up & (prefix > WIDENING_WINDOW[1] * root),
        "widening_low": down & (prefix < WIDENING_WINDOW[0] * root),
        "t": position,
        "S": prefix,
        "S2": prefix**2,
        "d": d,
        "d2": d**2,
        "r": ratio,
        "r2": ratio**2,
        "x": other,
        "x2": other**2,
        "entropy": entropy,
    }
    size = len(SIGNS) * BINS
    cells = np.stack([np.bincount(cell, values[name], size).astype(np.float64) for name in COLUMNS], axis=1)
    histogram = np.bincount(_histogram_bin(x[loss] if objective else x[:0]), minlength=HISTOGRAM_BINS)
    of = sequence.astype(np.int64)
    tokens = np.bincount(of, trained, sequences)
    shares = [np.bincount(of, side, sequences)[tokens > 0] / tokens[tokens > 0] for side in (high, low, dual)]
    return PositionStats(
        cells.reshape(len(SIGNS), BINS, len(COLUMNS)),
        histogram.astype(np.float64),
        np.array([*(share.sum() for share in shares), (tokens > 0).sum()], np.float64),
    )


def skipped_stats(sequences: Iterable[tuple[NDArray[Any], NDArray[Any]]]) -> PositionStats:
    """Of trajectories of advantage 0 that no pass runs over: only their numbers of tokens are known.

    sequences: response mask and loss mask of each, `[T]`. None of their tokens is clipped.
    """
    found = PositionStats.empty()
    zero = found.cells[SIGNS.index("zero")]
    for response, loss in sequences:
        where = np.flatnonzero(response)
        bins = bin_of(np.arange(1, len(where) + 1))
        zero[:, COLUMNS.index("n")] += np.bincount(bins, minlength=BINS)
        zero[:, COLUMNS.index("n_loss")] += np.bincount(bins, loss[where] != 0, BINS)
        found.shares[-1] += bool(np.any(loss[where]))
    return found


def _histogram_bin(log_ratio: NDArray[np.float64]) -> NDArray[np.int64]:
    size = np.abs(np.where(np.isnan(log_ratio), 0.0, log_ratio))
    with np.errstate(divide="ignore"):
        place = np.floor(np.log10(size / _SMALLEST) * _BINS_A_DECADE)
    place = np.clip(place, -1, _HALF - 1).astype(np.int64) + 1
    return _HALF + np.where(log_ratio < 0, -place, place)


def histogram_value(bin_: int) -> float:
    """The smallest |log r| of a bin of the histogram, with its sign: no quantile is beyond the extremes."""
    place = abs(bin_ - _HALF)
    size = 0.0 if place == 0 else _SMALLEST * 10 ** ((place - 1) / _BINS_A_DECADE)
    return math.copysign(size, bin_ - _HALF)


def quantile(histogram: NDArray[np.float64], share: float) -> float:
    """log r below which `share` of the tokens are, to one bin; NaN without tokens."""
    total = np.cumsum(histogram)
    if not total[-1]:
        return math.nan
    return histogram_value(int(np.searchsorted(total, share * total[-1])))


def _rates_by_sign(whole: PositionStats) -> dict[str, float]:
    """Loss tokens by the sign of their advantage, and the share of them that the bounds of this sign changed."""
    positive, negative = (float(count) for count in whole.column("n_loss").sum(1)[:2])
    metrics = {"pg_update/clip/pos_adv_token_count": positive, "pg_update/clip/neg_adv_token_count": negative}
    for side, sign, tokens in (("high", 0, positive), ("low", 1, negative), ("dual", 1, negative)):
        if tokens:
            clipped = float(whole.column(f"clip_{side}")[sign].sum())
            metrics[f"pg_update/clip/{side}/rate_of_{SIGNS[sign]}"] = clipped / tokens
    return metrics


QUANTILES = (25, 50, 75, 90, 95, 99)


def position_metrics(last: PositionStats, whole: PositionStats) -> dict[str, float]:
    """Metrics of a step. last: of its last optimizer step, where the ratio has moved furthest. whole: of all of them.

    `*_per_trajectory` is the mean over trajectories of the clipped share of each, as the authors' code averages. A mean
    over nothing is left out.
    """
    metrics = {}
    if last.histogram.any():
        metrics = {f"pg_update/is_ratio/p{each}": math.exp(quantile(last.histogram, each / 100)) for each in QUANTILES}
    count, total, squared = (float(last.column(name).sum()) for name in ("n_computed", "r", "r2"))
    if squared:
        metrics["pg_update/prefix_ratio/ess"] = total**2 / (count * squared)
    metrics |= _rates_by_sign(whole)
    *shares, trajectories = whole.shares.tolist()
    if trajectories:
        high, low, dual = (share / trajectories for share in shares)
        metrics |= {
            "pg_update/clip/high/rate_per_trajectory": high,
            "pg_update/clip/low/rate_per_trajectory": low,
            "pg_update/clip/dual/rate_per_trajectory": dual,
            "pg_update/clip/total/rate_per_trajectory": high + low + dual,
            "actor/pg_clipfrac_per_trajectory": high + low,
            "actor/pg_clipfrac_lower_per_trajectory": dual,
        }
    return metrics


def window_metrics(model_tokens: Sequence[int], objective: PolicyObjective | None) -> dict[str, float]:
    """Of the window [-low t^p, high t^p] on log r, with `clip_drift` around its centre, over all model tokens.

    model_tokens: number in each sequence; their positions t are 1, 2, ... Empty without tokens, and for a window of
    another kind (`clip_mode`). Source: `_compute_policy_loss_cum_token_la_impl` of horizon-llm/CTPO at acc4021.
    """
    lengths = np.asarray(model_tokens, np.int64)
    if objective is None or objective.clip_mode != "log_power" or not lengths.any():
        return {}
    longest = int(lengths.max())
    # As many tokens have position t as sequences have at least t tokens.
    count = np.bincount(lengths, minlength=longest + 1)[::-1].cumsum()[::-1][1:].astype(np.float64)
    positions = np.arange(1, longest + 1, dtype=np.float64)
    scale, centre = positions**objective.clip_power, -objective.clip_drift / 2 * positions
    middle = _median_position(count)
    metrics = {
        "pg_update/la_scale/mean": float(np.average(scale, weights=count)),
        "pg_update/la_scale/min": 1.0,
        "pg_update/la_scale/max": float(scale[-1]),
        "pg_update/la_scale/p50": float((scale[middle[0] - 1] + scale[middle[1] - 1]) / 2),
    }
    bounds = {"high": objective.clip_high, "low": -objective.clip_low, "c": objective.clip_c}
    for name, width in bounds.items():
        if width is not None and math.isfinite(width):
            ratio = np.exp(width * scale + centre)
            metrics[f"pg_update/la_clip_{name}_ratio/mean"] = float(np.average(ratio, weights=count))
    return metrics


def _median_position(count: np.ndarray) -> tuple[int, int]:
    """The positions of the two tokens in the middle, the same for an odd number."""
    total, before = int(count.sum()), np.cumsum(count)
    low, high = np.searchsorted(before, [(total + 1) // 2, total // 2 + 1]) + 1
    return int(low), int(high)
