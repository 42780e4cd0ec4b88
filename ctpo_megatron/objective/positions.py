"""Statistics of a step by position t in the response, from per-token outputs of the passes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ctpo_megatron.base.positions import (
    AGES,
    BINS,
    COLUMNS,
    HISTOGRAM_BINS,
    SIDES,
    SIGNS,
    PositionStats,
    bin_of,
    histogram_bin,
    quantile,
)
from ctpo_megatron.config import PolicyObjective
from ctpo_megatron.objective.ratios import (
    LOG_RATIO_CAP,
    LossTokens,
    SequenceBounds,
    objective_ratios,
    prefix_sum,
    token_log_ratio,
)
from ctpo_megatron.objective.surrogate import surrogate

FIXED_WINDOW = (math.log(0.5), math.log(5.0))
"""Bounds of log r of the fixed window that the paper compares with."""
WIDENING_WINDOW = (-0.025, 0.05)
"""Bounds of log r of the paper's window, times sqrt(t)."""
UNCERTAIN = 0.5
"""A token that the sampler gave a smaller probability is uncertain: another choice was as likely."""


@dataclass(frozen=True)
class SamplerTokens:
    """What the sampler knows of the tokens of a packed batch, all `[N]`, aligned with the log-probs.

    log_probs: nats, as it reported them. weight_version: of the weights that sampled the token, an integer. version: of
    the trainer's weights before the updates of the step; None: every token has age 0. trainer: log-probs under these
    weights, nats; None where they are not known.
    """

    log_probs: Tensor
    weight_version: Tensor
    version: int | None
    trainer: Tensor | None = None


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
    sampler: SamplerTokens | None = None,
) -> PositionStats:
    """Of the computed tokens of a packed batch `[N]`; arguments as for `policy_loss`.

    anchor: the denominator of the ratio (`old_log_probs` there). objective: None for a user's own, whose ratio and
    clips are unknown. entropy: nats, None where it is not known. S is the cumulative log-ratio whatever the objective's
    ratio is; x is the objective's, and not summed where that is S. sampler: None without one; then no
    token is uncertain or has an age. Sums run over the tokens in their order, in float64 on the host.
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
    numbers += [trained, *flags, torch.zeros_like(x) if entropy is None else entropy]
    numbers += [*_of_sampler(sampler, model, layout), model]
    # One copy to the host, because each copy waits for the device; so does a selection by a mask on the device.
    on_host = torch.stack([values.double() for values in numbers]).cpu().numpy()
    table = on_host[:-1, on_host[-1] > 0]
    return _summed(table, layout.sequences, entropy is not None, objective)


def _of_sampler(sampler: SamplerTokens | None, model: Tensor, layout: SequenceBounds) -> list[Tensor]:
    """`[N]` each: whether a token is uncertain, its age (-1: unknown), whether m is known, m and its prefix sum M."""
    zero = torch.zeros_like(model, dtype=torch.float32)
    if sampler is None:
        return [zero, zero - 1, zero, zero, zero]
    log_probs = layout.values(sampler.log_probs, "log_probs", torch.float32)
    version = layout.values(sampler.weight_version, "weight_version", torch.int64)
    age = torch.zeros_like(version) if sampler.version is None else sampler.version - version
    uncertain = log_probs < math.log(UNCERTAIN)
    if sampler.trainer is None:
        return [uncertain, age.clamp(0, AGES - 1), zero, zero, zero]
    m = token_log_ratio(layout.values(sampler.trainer, "trainer", torch.float32), log_probs, model)
    return [uncertain, age.clamp(0, AGES - 1), torch.ones_like(zero), m, prefix_sum(m, layout)]


def _summed(
    table: NDArray[np.float64], sequences: int, with_entropy: bool, objective: PolicyObjective | None
) -> PositionStats:
    position, sequence, gain, prefix, d, x, trained, high, low, dual, entropy, uncertain, age, known, m, whole = table
    sign = np.where(gain > 0, 0, np.where(gain < 0, 1, 2))
    place = bin_of(position.astype(np.int64))
    cell = sign * BINS + place
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
        "n_uncertain": (up | down) * uncertain,
        "uncertain_high": high * uncertain,
        "uncertain_low": low * uncertain,
        "uncertain_dual": dual * uncertain,
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
    histogram = np.bincount(histogram_bin(x[loss] if objective else x[:0]), minlength=HISTOGRAM_BINS)
    of = sequence.astype(np.int64)
    tokens = np.bincount(of, trained, sequences)
    shares = [np.bincount(of, side, sequences)[tokens > 0] / tokens[tokens > 0] for side in (high, low, dual)]
    aged = age >= 0
    by_bin = [np.bincount(place, each, BINS) for each in (known, m, m**2, whole, whole**2)]
    by_age = [np.bincount(age[aged].astype(np.int64), each[aged], AGES) for each in (aged, known, m, m**2)]
    return PositionStats(
        cells.reshape(len(SIGNS), BINS, len(COLUMNS)),
        histogram.astype(np.float64),
        np.array([*(share.sum() for share in shares), (tokens > 0).sum()], np.float64),
        np.stack(by_bin, axis=1),
        np.stack(by_age, axis=1),
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


def _rates_by_sign(whole: PositionStats) -> dict[str, float]:
    """Loss tokens by the sign of their advantage, and the share of them that the bounds of this sign changed.

    The same of those that were uncertain.
    """
    positive, negative = (float(count) for count in whole.column("n_loss").sum(1)[:2])
    metrics = {"pg_update/clip/pos_adv_token_count": positive, "pg_update/clip/neg_adv_token_count": negative}
    for end, of, clipped in (("", "n_loss", "clip"), ("_uncertain", "n_uncertain", "uncertain")):
        for side, sign in (("high", 0), ("low", 1), ("dual", 1)):
            if tokens := float(whole.column(of)[sign].sum()):
                count = float(whole.column(f"{clipped}_{side}")[sign].sum())
                metrics[f"pg_update/clip/{side}/rate_of_{SIGNS[sign]}{end}"] = count / tokens
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
