"""Log importance ratios of tokens against the anchor: of a token, a prefix, a turn or a whole sequence.

Padded `[B, T]` and packed `[N]` batches are seen as flat tokens with the boundaries of their sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ctpo_kernels.names import RatioMode
from ctpo_megatron.config import PolicyObjective

TOKEN_LOG_RATIO_LIMIT = 20.0
"""d_t is clamped to +- this (nats) before it enters a sum; the value is detached, so no gradient is lost."""

LOG_RATIO_CAP = 10.0
"""log r_t is capped at this (nats); beyond it the gradient is zero."""

FRACTION_BITS = 40
"""S_t is summed in integer units of 2^-40 nats."""


@dataclass(frozen=True)
class SequenceBounds:
    """Sequence boundaries of a batch seen as flat `[N]` tokens. Everything below works on this flat form.

    A padded `[B, T]` batch is a packed batch in which every sequence has T tokens and the padding is masked. So there
    is one code path, and padded and packed batches agree by construction.

    shape: shape of the caller's token tensors, `[B, T]` or `[N]`.
    cu_seqlens: int64 `[B + 1]`, sequence b is `cu_seqlens[b] : cu_seqlens[b + 1]`.
    sequence_id: int64 `[N]`, the sequence of each token; B for padding after the last sequence.
    """

    shape: torch.Size
    cu_seqlens: Tensor
    sequence_id: Tensor

    @classmethod
    def of(cls, tokens: Tensor, cu_seqlens: Tensor | None) -> SequenceBounds:
        """Return the layout of `tokens`, `[B, T]` without `cu_seqlens` or `[N]` with `cu_seqlens` `[B + 1]`.

        Positions from `cu_seqlens[-1]` on are padding and belong to no sequence. Raises ValueError for other shapes,
        and for boundaries that do not start at 0, decrease, or exceed N. The values are checked on the CPU only, where
        that needs no synchronisation.
        """
        device, n = tokens.device, tokens.numel()
        if cu_seqlens is None:
            if tokens.dim() != 2:
                raise ValueError(f"tokens of shape {tuple(tokens.shape)} need cu_seqlens; without it give [B, T]")
            rows, width = tokens.shape
            boundaries = torch.arange(rows + 1, device=device) * width
        else:
            if tokens.dim() != 1 or cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.is_floating_point():
                raise ValueError(
                    f"cu_seqlens must be an integer [B + 1] tensor for tokens [N]; got {cu_seqlens.dtype} "
                    f"{tuple(cu_seqlens.shape)} for {tuple(tokens.shape)}"
                )
            if cu_seqlens.device.type == "cpu":
                decreasing = bool((cu_seqlens.diff() < 0).any())
                if int(cu_seqlens[0]) != 0 or decreasing or int(cu_seqlens[-1]) > n:
                    raise ValueError(f"cu_seqlens must rise from 0 to at most {n}; got {cu_seqlens.tolist()}")
            boundaries = cu_seqlens.to(device=device, dtype=torch.int64)
        # right=True assigns a token to the first sequence that ends after it, which skips empty sequences.
        sequence_id = torch.searchsorted(boundaries[1:].contiguous(), torch.arange(n, device=device), right=True)
        return cls(tokens.shape, boundaries, sequence_id)

    @property
    def sequences(self) -> int:
        """B, empty and fully masked sequences included."""
        return self.cu_seqlens.numel() - 1

    def mask(self, mask: Tensor, name: str) -> Tensor:
        """Return a 0/1 mask in the caller's shape as bool `[N]`, false on padding after the last sequence."""
        if mask.shape != self.shape:
            raise ValueError(f"{name} has shape {tuple(mask.shape)}; expected {tuple(self.shape)}")
        return (mask.to(self.sequence_id.device) != 0).reshape(-1) & (self.sequence_id < self.sequences)

    def masks(self, response_mask: Tensor, loss_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """bool `[N]` each: which tokens the policy sampled, and which count in the loss (None: all of these)."""
        model = self.mask(response_mask, "response_mask")
        return model, model if loss_mask is None else model & self.mask(loss_mask, "loss_mask")

    def values(self, values: Tensor, name: str, dtype: torch.dtype, *, per_sequence: bool = False) -> Tensor:
        """Per-token values in the caller's shape as `[N]` of `dtype`; with `per_sequence` also `[B]`, broadcast.

        A flat tensor with N == B is read as per token.
        """
        if values.shape == self.shape:
            return values.reshape(-1).to(dtype)
        if per_sequence and values.shape == (self.sequences,):
            return self.to_tokens(values.to(dtype))
        also = f" or [{self.sequences}]" if per_sequence else ""
        raise ValueError(f"{name} has shape {tuple(values.shape)}; expected {list(self.shape)}{also}")

    def to_tokens(self, per_sequence: Tensor) -> Tensor:
        """`[B]` -> `[N]`: every token gets the value of its sequence, padding gets 0."""
        return torch.cat([per_sequence, per_sequence.new_zeros(1)])[self.sequence_id]

    def cumulative_sum(self, values: Tensor) -> Tensor:
        """Inclusive running sum of int64 `[N]` that restarts at every sequence."""
        before = self._exclusive(values)
        return before[1:] - self.to_tokens(before[self.cu_seqlens[:-1]])

    def total(self, values: Tensor) -> Tensor:
        """int64 `[N]` -> `[B]`: the sum over each sequence."""
        before = self._exclusive(values)
        return before[self.cu_seqlens[1:]] - before[self.cu_seqlens[:-1]]

    @staticmethod
    def _exclusive(values: Tensor) -> Tensor:
        """`[N]` -> `[N + 1]`: the sum before each position. A sum over the whole batch and a subtraction are exact only
        for integers: in floating point the rounding of earlier sequences would remain."""
        if values.dtype != torch.int64:
            raise TypeError(f"segmented sums are exact for int64 only; got {values.dtype}")
        return torch.cat([values.new_zeros(1), values.cumsum(0)])


@dataclass(frozen=True)
class TurnEnds:
    """Where the turns of a flat batch end; all `[N]`, meaningful where the policy sampled the token.

    last: bool, the last model token of its turn. end: int64, the token at which its turn ends. following: int64, the
    next model token of its sequence, N where there is none.
    """

    last: Tensor
    end: Tensor
    following: Tensor
    layout: SequenceBounds

    @classmethod
    def of(cls, turn: Tensor, model: Tensor, layout: SequenceBounds) -> TurnEnds:
        """turn: the turn of each token, an integer `[N]`. model: bool `[N]`, the policy sampled the token."""
        n = model.numel()
        following = _places(model)[model.cumsum(0)]
        sequence = torch.cat([layout.sequence_id, layout.sequence_id.new_full((1,), -1)])
        following = torch.where(sequence[following] == layout.sequence_id, following, n)
        number = torch.cat([turn, turn.new_full((1,), -1)])
        last = model & (number[following] != turn)
        end = _places(last)[last.cumsum(0) - last.to(torch.int64)]
        return cls(last, end.clamp(max=n - 1), following, layout)

    def gain(self, advantage: Tensor) -> Tensor:
        """Return what a turn has on its own: its advantage minus the next turn's, `[N]`, from advantages `[N]`.

        Advantages are of returns to go, so that these add up to the advantage over a turn and all later ones.
        """
        return advantage - torch.cat([advantage, advantage.new_zeros(1)])[self.following]

    def at_end(self, values: Tensor) -> Tensor:
        """`[N]` -> `[N]`: every token gets the value at the end of its turn."""
        return values[self.end]

    def sum_from_here(self, values: Tensor) -> Tensor:
        """Return the sum of `values` `[N]` over the ends of the token's turn and of all later ones, float64 `[N]`.

        Pairs at distances of 1, 2, 4, ... are added, so the bits do not depend on what else is in the batch.
        """
        total = torch.where(self.last, values.double(), 0.0)
        sequence, n, distance = self.layout.sequence_id, values.numel(), 1
        while distance < n:
            together = sequence[distance:] == sequence[:-distance]
            later = torch.where(together, total[distance:], 0.0)
            total = total + torch.cat([later, later.new_zeros(distance)])
            distance *= 2
        return total


def _places(mask: Tensor) -> Tensor:
    """int64 `[N + 1]`: the index of the k-th token of a bool mask `[N]`, from 0; N where there are fewer."""
    n = mask.numel()
    rank = torch.where(mask, mask.cumsum(0) - 1, n)
    index = torch.arange(n + 1, device=mask.device)
    found = torch.full_like(index, n).scatter(0, rank, index[:-1])
    return torch.where(index < n, found, n)  # the last place received all tokens that are not in the mask


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
    """Return the log-ratio of every token: log r_t = sg[x_t] + log p_t - sg[log p_t], with x_t by `mode` (sg =
    stop-gradient)

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
