"""The loss in plain torch, with an explicit gradient: the same integers and decisions as the Triton kernels.

Segments are sequences, or pieces of sequences. A piece starts from a `state` int64 `[S, 3]`, the sums over the pieces
before it: prefix in units of 2^-40 nats, response tokens, NaN among them. `totals` int64 `[S, 4]` are the same sums
over the whole sequence, and its loss tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ctpo_kernels.packed import PackedTokens
from ctpo_kernels.spec import D_LIMIT, FRACTION_BITS, LOG_RATIO_CAP, LossSpec, inverse_of_loss_tokens
from ctpo_kernels.stats import MAXIMA, SUMS, PerToken

UNIT = 2.0**-FRACTION_BITS


@dataclass(frozen=True)
class LossPass:
    """loss: scalar. gradient: d loss / d log_probs_t, `[N]`, 0 at masked tokens; both in the dtype of the log-probs.

    vector: float64 `[len(SUMS) + len(MAXIMA)]`.
    """

    loss: Tensor
    gradient: Tensor
    vector: Tensor
    per_token: PerToken | None


def position_scale(position: Tensor, power: float, dtype: torch.dtype) -> Tensor:
    """t^power; the paper's powers in operations that IEEE 754 rounds identically everywhere, others through float64."""
    t = position.clamp(min=1)
    if power == 0.0:
        return torch.ones_like(position, dtype=dtype)
    if power == 0.5:
        return t.to(dtype).sqrt()
    if power == -0.5:
        return 1.0 / t.to(dtype).sqrt()
    return (t.double() ** power).to(dtype)


def token_units(batch: PackedTokens) -> tuple[Tensor, Tensor, Tensor]:
    """d_t `[N]` (0 at masked tokens, NaN kept), the same in int64 units (half to even; NaN as 0), int64 NaN flags."""
    if batch.old_log_probs is None:
        d = batch.log_probs - batch.log_probs  # 0, and NaN where the log-prob is not finite
    else:
        d = (batch.log_probs - batch.old_log_probs).clamp(-D_LIMIT, D_LIMIT)
    d = torch.where(batch.sampled, d, 0.0)
    bad = d.isnan()
    units = torch.round(torch.where(bad, 0.0, d).double() * 2.0**FRACTION_BITS).to(torch.int64)
    return d, units, bad.to(torch.int64)


def segment_totals(batch: PackedTokens) -> Tensor:
    """int64 `[S, 4]`: units, response tokens, NaN among them, loss tokens of each segment."""
    _, units, bad = token_units(batch)
    columns = (units, batch.sampled.to(torch.int64), bad, batch.trained.to(torch.int64))
    before = [_before(column) for column in columns]
    return torch.stack([b[batch.cu[1:]] - b[batch.cu[:-1]] for b in before], dim=1)


def loss_pass(
    batch: PackedTokens,
    spec: LossSpec,
    inverse: float | Tensor | None,
    *,
    state: Tensor | None = None,
    totals: Tensor | None = None,
    positions: int | None = None,
    per_token: bool = False,
) -> LossPass:
    """Loss, gradient and statistics of the segments of a batch.

    inverse: `LossSpec.inverse_denominator`. state: None starts every segment at zero. totals: None takes each segment
    for a whole sequence. positions: an upper bound on the response tokens of a sequence, needed when `state` is given
    (default: the tokens of the batch); unused in this backend.
    """
    dtype = batch.log_probs.dtype
    segment = batch.segment
    model, trained = batch.sampled, batch.trained
    if totals is None and (spec.whole_sequence or spec.per_sequence):
        totals = segment_totals(batch)

    d, units, bad = token_units(batch)
    prefix, tokens, nans = _prefixes(batch, units, bad, segment, state)
    position = tokens.to(torch.int64)
    match spec.ratio_mode:
        case "cumprod":
            log_ratio = _nats(prefix, nans, dtype)
        case "geomean":
            log_ratio = _nats(prefix, nans, dtype) / position.clamp(min=1).to(dtype)
        case "token":
            log_ratio = d
        case "sequence" | "sequence-geomean":
            assert totals is not None  # as above
            total = _spread(totals, segment)
            log_ratio = _nats(total[0], total[2], dtype)
            if spec.ratio_mode == "sequence-geomean":
                log_ratio = log_ratio / total[1].clamp(min=1).to(dtype)
    log_ratio = torch.where(model, log_ratio, 0.0)

    advantage = torch.where(trained, batch.per_token(batch.advantages), 0.0)
    weight = None if batch.weights is None else torch.where(trained, batch.per_token(batch.weights), 0.0)
    over = log_ratio > LOG_RATIO_CAP
    x = torch.where(over, LOG_RATIO_CAP, log_ratio)
    bounds = spec.bounds
    scale = position_scale(position, bounds.power, dtype)
    high, low, dual = bounds.high * scale, -bounds.low * scale, bounds.dual * scale
    # By its sign an advantage has one bound. A weight has both, and meets the one on its ratio's side of 1.
    side = torch.where(x > 0, advantage.abs(), -advantage.abs()) if spec.detached else advantage
    is_high = (side > 0) & (x > high)
    is_low = (side < 0) & (x < low)
    is_dual = (side < 0) & (x > dual)
    bounded = torch.where(is_high, high, torch.where(is_low, low, torch.where(is_dual, dual, x)))
    ratio = x.exp()
    token_loss, slope = -advantage * bounded.exp(), -advantage * ratio
    if spec.detached:
        token_loss, slope = token_loss * batch.log_probs, token_loss
    if weight is not None:
        token_loss, slope = token_loss * weight, slope * weight
    token_loss = torch.where(trained, token_loss, 0.0)
    inverse = inverse_of_loss_tokens(batch) if inverse is None else inverse
    factor = _factor(inverse, totals, spec, segment, dtype)
    flat = is_high | is_low | is_dual | over
    learns = trained if spec.detached else trained & ~flat
    gradient = torch.where(learns, slope * factor, 0.0)

    vector = _vector(token_loss, factor, trained, model, d, ratio, log_ratio, (is_high, is_low, is_dual, over))
    details = None
    if per_token:
        clip = is_high * 1 + is_low * 2 + is_dual * 3
        clip = torch.where(trained & over & (clip == 0), 4, clip).to(torch.int8)
        details = PerToken(token_loss, log_ratio, torch.where(model, prefix, 0), clip)
    return LossPass(vector[0].to(dtype), gradient, vector, details)


class TorchLossStream:
    """The same loss over successive windows of a batch, as the streaming head produces its log-probs."""

    def __init__(
        self, batch: PackedTokens, spec: LossSpec, inverse: float | Tensor, *, totals: Tensor | None, state: Tensor
    ) -> None:
        """batch: its log-probs are filled in. totals: as `loss_pass`, needed where the spec asks for them.

        state: int64 `[S, 3]`, advanced in place.
        """
        self._batch, self._spec, self._inverse, self._totals, self._state = batch, spec, inverse, totals, state
        self._vector: Tensor | None = None

    def step(self, start: int, end: int) -> Tensor:
        """Gradient `[end - start]` of the window's tokens, whose log-probs must already be in the batch.

        Windows must be consecutive.
        """
        window = self._batch.window(start, end)
        out = loss_pass(window, self._spec, self._inverse, state=self._state, totals=self._totals)
        self._state += segment_totals(window)[:, :3]
        self._vector = out.vector if self._vector is None else merge_vectors(self._vector, out.vector)
        return out.gradient

    def finish(self) -> Tensor:
        """Return the statistics of all windows, as `LossPass.vector`."""
        if self._vector is None:
            return empty_vector(self._batch.cu.device)
        return self._vector


def empty_vector(device: torch.device) -> Tensor:
    """Return the statistics of a batch without tokens."""
    return torch.tensor([0.0] * len(SUMS) + [-math.inf] * len(MAXIMA), dtype=torch.float64, device=device)


def merge_vectors(a: Tensor, b: Tensor) -> Tensor:
    """Statistics of two parts of a batch."""
    n = len(SUMS)
    return torch.cat([a[:n] + b[:n], torch.maximum(a[n:], b[n:])])


def _before(values: Tensor) -> Tensor:
    """int64 `[N]` -> `[N + 1]`: the sum before each position. It may wrap: differences modulo 2^64 are still right."""
    return torch.cat([values.new_zeros(1), values.cumsum(0)])


def _prefixes(
    batch: PackedTokens, units: Tensor, bad: Tensor, segment: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Inclusive sums within each segment, int64 `[N]` each: units, response tokens, NaN flags."""
    result = []
    for column, values in enumerate((units, batch.sampled.to(torch.int64), bad)):
        before = _before(values)
        start = before[batch.cu[:-1]]
        if state is not None:
            start = start - state[:, column]
        result.append(before[1:] - torch.cat([start, start.new_zeros(1)])[segment])
    return result[0], result[1], result[2]


def _nats(units: Tensor, nans: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(nans > 0, torch.nan, units.to(dtype) * UNIT)


def _spread(totals: Tensor, segment: Tensor) -> Tensor:
    """`[S, K]` -> `[K, N]`: every token gets its segment's values, padding gets 0."""
    return torch.cat([totals, totals.new_zeros(1, totals.shape[1])])[segment].T


def _factor(
    inverse: float | Tensor, totals: Tensor | None, spec: LossSpec, segment: Tensor, dtype: torch.dtype
) -> Tensor | float:
    """Factor of each token's loss in the aggregated one."""
    if not spec.per_sequence:
        return inverse if isinstance(inverse, float) else inverse.to(dtype)
    assert totals is not None  # the caller counts them for this aggregation
    lengths = _spread(totals, segment)[3].clamp(min=1).double()
    # torch divides a number by a tensor through the reciprocal, which has other bits than the division of two tensors.
    dividend = inverse if isinstance(inverse, Tensor) else torch.full_like(lengths, inverse)
    return (dividend / lengths).to(dtype)


def _vector(
    token_loss: Tensor,
    factor: Tensor | float,
    trained: Tensor,
    model: Tensor,
    d: Tensor,
    ratio: Tensor,
    log_ratio: Tensor,
    clips: tuple[Tensor, Tensor, Tensor, Tensor],
) -> Tensor:
    """Sums and extrema in the order of SUMS and MAXIMA, float64."""
    excess = torch.where(trained, ratio.double() - 1, 0.0)
    sums = [
        (token_loss.double() * factor).sum(),
        trained.sum(),
        model.sum(),
        -d.double().sum(),
        excess.sum(),
        excess.square().sum(),
        *((trained & clip).sum() for clip in clips),
    ]
    none = token_loss.new_full((1,), -math.inf, dtype=torch.float64)

    def largest(values: Tensor, mask: Tensor) -> Tensor:
        return torch.cat([torch.where(mask, values.double(), -math.inf), none]).amax()

    maxima = [largest(ratio, trained), largest(-ratio, trained), largest(log_ratio.abs(), model)]
    return torch.stack([value.double() for value in (*sums, *maxima)])
