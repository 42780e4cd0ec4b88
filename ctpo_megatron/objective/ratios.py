"""Log importance ratios of tokens: against the anchor, of a prefix or of a sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ctpo_kernels.names import RatioMode
from ctpo_megatron.config import PolicyObjective
from ctpo_megatron.objective.sequences import SequenceBounds
from ctpo_megatron.objective.turns import TurnEnds

TOKEN_LOG_RATIO_LIMIT = 20.0
"""d_t is clamped to +- this (nats) before it enters a sum; the value is detached, so no gradient is lost."""

LOG_RATIO_CAP = 10.0
"""log r_t is capped at this (nats); beyond it the gradient is zero."""

FRACTION_BITS = 40
"""S_t is summed in integer units of 2^-40 nats."""


@dataclass(frozen=True)
class LossTokens:
    """The tokens of a flat batch, all `[N]`, with their sequences.

    log_probs: differentiable, nats, finite where `model` is False. anchor: denominator of the ratios, nats. advantage:
    detached, 0 where `trained` is False. Ratios at the ends of turns need it wherever `model` is True: an end may be
    out of the loss. model: bool, the policy sampled the token. trained: bool, its loss counts.
    """

    log_probs: Tensor
    anchor: Tensor
    advantage: Tensor
    model: Tensor
    trained: Tensor
    layout: SequenceBounds


@dataclass(frozen=True)
class TokenRatios:
    """Log-ratios of a flat batch; every field is `[N]` and meaningful where response_mask is 1.

    log_ratio: log r_t before the upper cap, nats; d log_ratio_t / d log_probs_t = 1 and 0 for every other token.
    d: detached token log-ratio log_probs_t - anchor_t within +-20 nats; 0 where response_mask is 0.
    position: int64, model tokens of the sequence up to and including this one (t, from 1).
    ends: where the turns end, if log r_t is the log-ratio at the end of the token's turn.
    """

    log_ratio: Tensor
    d: Tensor
    position: Tensor
    ends: TurnEnds | None = None

    @property
    def reach(self) -> Tensor:
        """The position up to which log r_t reaches, at which its bounds are taken: int64 `[N]`."""
        return self.position if self.ends is None else self.ends.at_end(self.position)


def token_log_ratio(log_probs: Tensor, old_log_probs: Tensor, response_mask: Tensor) -> Tensor:
    """d_t = clamp(log p_t - log p_old_t, -20, 20), detached, and exactly 0 where response_mask is 0, NaN included.

    All `[N]`; NaN in a model token stays NaN, an infinite difference becomes +-20.
    """
    d = (log_probs.detach() - old_log_probs.detach()).clamp(-TOKEN_LOG_RATIO_LIMIT, TOKEN_LOG_RATIO_LIMIT)
    return torch.where(response_mask, d, 0.0)


def _fixed_point(d: Tensor) -> tuple[Tensor, Tensor]:
    """d as int64 units of 2^-40 (round half to even; NaN as 0), and int64 NaN flags.

    |d| <= 20 uses 45 bits, so a sequence holds 2^18 tokens at the limit before 64 bits could overflow. The running sum
    over the batch may wrap: differences modulo 2^64 are still right.
    """
    bad = d.isnan()
    units = torch.round(torch.where(bad, 0.0, d).double() * 2.0**FRACTION_BITS).to(torch.int64)
    return units, bad.to(torch.int64)


def _nats(units: Tensor, bad: Tensor) -> Tensor:
    """Inverse of `_fixed_point` for a sum of units that contains `bad` NaN terms: float64."""
    return torch.where(bad > 0, torch.nan, units.double() * 2.0**-FRACTION_BITS)


def prefix_sum(d: Tensor, layout: SequenceBounds) -> Tensor:
    """S_t = sum_{k <= t} d_k within each sequence, float64 `[N]`, from `d` `[N]` that is 0 at masked tokens.

    Summed in 64-bit fixed point: integer addition is associative, so S_t has the same bits for any packing order,
    padding or batch composition. A NaN makes S NaN from its position to the end of its own sequence.
    """
    units, bad = _fixed_point(d)
    return _nats(layout.cumulative_sum(units), layout.cumulative_sum(bad))


def sequence_sum(d: Tensor, layout: SequenceBounds) -> Tensor:
    """S_T, the sum over each whole sequence broadcast to its tokens, float64 `[N]`; exact as `prefix_sum` is."""
    units, bad = _fixed_point(d)
    return layout.to_tokens(_nats(layout.total(units), layout.total(bad)))


def token_ratios(
    mode: RatioMode, log_probs: Tensor, old_log_probs: Tensor, response_mask: Tensor, layout: SequenceBounds
) -> TokenRatios:
    """The log-ratio of every token: log r_t = sg[x_t] + log p_t - sg[log p_t], with x_t by `mode` (sg = stop-gradient)

        cumprod            S_t            prefix product of token ratios (CTPO)
        geomean            S_t / t        its geometric mean
        token              d_t            PPO, GRPO, DAPO
        sequence           S_T            product over the whole sequence
        sequence-geomean   S_T / T        its geometric mean (GSPO, in the token form of its authors)

    where T counts the model tokens of the sequence. All inputs are `[N]`; `log_probs` must be finite at masked tokens
    (the caller sets 0 there); other masked values have no effect.
    """
    d = token_log_ratio(log_probs, old_log_probs, response_mask)
    counts = response_mask.to(torch.int64)
    position = layout.cumulative_sum(counts)
    match mode:
        case "cumprod":
            x = prefix_sum(d, layout)
        case "geomean":
            x = prefix_sum(d, layout) / position.clamp(min=1)
        case "token":
            x = d
        case "sequence":
            x = sequence_sum(d, layout)
        case "sequence-geomean":
            x = sequence_sum(d, layout) / layout.to_tokens(layout.total(counts)).clamp(min=1)
        case _:
            raise ValueError(f"unknown ratio_mode {mode!r}")
    # log_probs - sg[log_probs] has the value 0 and the gradient 1, so no gradient reaches other tokens.
    return TokenRatios(log_ratio=x.to(log_probs.dtype) + (log_probs - log_probs.detach()), d=d, position=position)


def objective_ratios(
    objective: PolicyObjective | None,
    log_probs: Tensor,
    old_log_probs: Tensor,
    model: Tensor,
    layout: SequenceBounds,
    turn: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, TokenRatios]:
    """Log-probs and anchors as `[N]` of `dtype`, from tensors in the caller's shape, and the ratios of an objective.

    These are `token_ratios`; with `turn_ratio: turn-end` those at the end of each token's turn. objective: None for a
    user's own, with the ratio of each token. turn: the turn of each token, integers; may be None for other objectives.
    The gradient is 1 in the token's own log-prob and 0 in others. Raises ValueError where turns are needed and missing.
    """
    # Mask before any arithmetic: 0 * NaN is NaN, in the forward pass and in the gradient.
    current = torch.where(model, layout.values(log_probs, "log_probs", dtype), 0.0)
    anchor = layout.values(old_log_probs, "old_log_probs", dtype)
    turns = None if turn is None else layout.values(turn, "turn", turn.dtype)
    ratios = token_ratios("token" if objective is None else objective.ratio_mode, current, anchor, model, layout)
    if objective is None or objective.turn_ratio == "prefix":
        return current, anchor, ratios
    if turns is None:
        raise ValueError("turn_ratio: turn-end needs the turn of every token; give turn")
    ends = TurnEnds.of(turns, model, layout)
    own = current - current.detach()
    return current, anchor, replace(ratios, log_ratio=ends.at_end(ratios.log_ratio.detach()) + own, ends=ends)
