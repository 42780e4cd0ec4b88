"""The loss once more, token by token in Python floats (64 bit), for tests; log-probs by float64 autograd.

The loss is written from the formulas, not from the kernels: every sum is `math.fsum` over all its terms, nothing is
carried along, no tensor operation takes part. Slow by design: thousands of tokens, not millions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ctpo_kernels.spec import LossSpec

CUT = 20.0
CAP = 10.0
IGNORED_LABEL = -100
Numbers = Tensor | Sequence[float]
Row = list[float]


@dataclass(frozen=True)
class LossReference:
    """loss: aggregated. All lists `[N]`, 0 where they do not apply.

    gradient: d loss / d log p_t. token_loss: l_t w_t before aggregation. log_ratio: log r_t before the cap, nats, at
    response tokens. prefix: S_t, nats, at response tokens. clip: 0 inside the window, 1 above it (A > 0), 2 below it
    (A < 0), 3 beyond the dual bound (A < 0), 4 inside but above the cap; 1 and 2 of a limited weight for either sign.
    stats: by the names in SUMS and MAXIMA.
    """

    loss: float
    gradient: Row
    token_loss: Row
    log_ratio: Row
    prefix: Row
    clip: list[int]
    stats: dict[str, float]


@dataclass(frozen=True)
class LogProbsReference:
    """log_probs, entropy: `[N]`, nats. d_logits: `[N, V]`, derivative of sum_i g_i log_prob_i, 0 in padding columns."""

    log_probs: Tensor
    entropy: Tensor
    d_logits: Tensor


@dataclass(frozen=True)
class LinearReference:
    """loss: of `log_probs` `[N]` (0 where masked). d_hidden `[N, H]`, d_weight `[V, H]`: its gradients."""

    loss: LossReference
    log_probs: Tensor
    d_hidden: Tensor
    d_weight: Tensor


def ctpo_loss_reference(
    log_probs: Numbers,
    old_log_probs: Numbers | None,
    response_mask: Numbers,
    advantages: Numbers,
    cu_seqlens: Numbers,
    *,
    loss_mask: Numbers | None = None,
    weights: Numbers | None = None,
    batch_num_tokens: float | None = None,
    global_batch_size: float | None = None,
    **loss_keywords: Any,
) -> LossReference:
    """What `ctpo_loss` computes, with its arguments, tensors or lists; loss_keywords: as `LossSpec`.

    Raises KeyError for an unknown mode, TypeError for an unknown keyword.
    """
    o = LossSpec(**loss_keywords)
    new = _list(log_probs)
    n = len(new)
    bounds = [int(x) for x in _list(cu_seqlens)]
    old = new if old_log_probs is None else _list(old_log_probs)
    response = [x != 0 for x in _list(response_mask)]
    counted = response if loss_mask is None else [m and x != 0 for m, x in zip(response, _list(loss_mask), strict=True)]
    sequence_of = _sequence_of(bounds, n)
    advantage = _per_token(advantages, sequence_of, n)
    weight = [1.0] * n if weights is None else _per_token(weights, sequence_of, n)
    loss_tokens = sum(1 for i in range(bounds[-1]) if counted[i])
    tokens = max(1.0, float(loss_tokens if batch_num_tokens is None else batch_num_tokens))
    sequences = max(1.0, float(len(bounds) - 1 if global_batch_size is None else global_batch_size))

    out = LossReference(0.0, [0.0] * n, [0.0] * n, [0.0] * n, [0.0] * n, [0] * n, {})
    shares: Row = []
    minus_d: Row = []
    ratios: Row = []
    for start, end in itertools.pairwise(bounds):
        inside = range(start, end)
        d = {i: _cut(new[i] - old[i]) for i in inside if response[i]}
        minus_d += [-x for x in d.values()]
        own_loss_tokens = max(1, sum(1 for i in inside if counted[i]))
        whole = math.fsum(d.values())
        so_far: Row = []
        for i in d:
            so_far.append(d[i])
            t = len(so_far)
            prefix = math.fsum(so_far)
            log_ratio = {
                "cumprod": prefix,
                "geomean": prefix / t,
                "token": d[i],
                "sequence": whole,
                "sequence-geomean": whole / len(d),
            }[o.ratio_mode]
            out.prefix[i], out.log_ratio[i] = prefix, log_ratio
            if not counted[i]:
                continue
            a = advantage[i]
            log_r = CAP if log_ratio > CAP else log_ratio
            r = _exp(log_r)
            low, high, dual = _window(o.clip_mode, o.clip_low, o.clip_high, o.clip_c, t**o.clip_power)
            # The bounds are stated for log r or for r: the decision is taken on that very quantity.
            x = log_r if o.clip_mode == "log_power" else r
            as_ratio = _exp if o.clip_mode == "log_power" else float
            l1 = -a * r
            l2 = -a * as_ratio(min(max(x, low), high)) if not math.isnan(x) else math.nan
            token_loss = max(l1, l2)
            if a < 0 and dual is not None and not math.isnan(x):
                token_loss = min(token_loss, -a * as_ratio(dual))
            limits = o.clip_mode == "detached_ratio" and a != 0  # the weight, whatever the sign of A is
            if limits:
                token_loss = l2 * new[i]
            if (a > 0 or limits) and x > high:
                code = 1
            elif (a < 0 or limits) and x < low:
                code = 2
            elif a < 0 and dual is not None and x > dual:
                code = 3
            else:
                code = 4 if log_ratio > CAP else 0
            share = {
                "token-mean": 1.0 / tokens,
                "seq-mean-token-mean": 1.0 / (sequences * own_loss_tokens),
                "seq-mean-token-sum": 1.0 / (sequences * o.loss_scale_factor),
            }[o.loss_agg_mode]
            out.token_loss[i] = token_loss * weight[i]
            slope = l2 if limits else -a * r if code == 0 else 0.0
            out.gradient[i] = slope * weight[i] * share
            out.clip[i] = code
            shares.append(out.token_loss[i] * share)
            ratios.append(r)
    loss = math.fsum(shares)
    capped = [i for i in range(bounds[-1]) if counted[i] and out.log_ratio[i] > CAP]
    stats = {
        "loss": loss,
        "loss_tokens": float(loss_tokens),
        "model_tokens": float(sum(1 for i in range(bounds[-1]) if response[i])),
        "minus_d": math.fsum(minus_d),
        "ratio_excess": math.fsum(r - 1.0 for r in ratios),
        "ratio_excess_squared": math.fsum((r - 1.0) ** 2 for r in ratios),
        "clip_high": float(out.clip.count(1)),
        "clip_low": float(out.clip.count(2)),
        "clip_dual": float(out.clip.count(3)),
        "capped": float(len(capped)),
        "ratio": _largest(ratios),
        "minus_ratio": _largest([-r for r in ratios]),
        "abs_log_ratio": _largest([abs(out.log_ratio[i]) for i in range(bounds[-1]) if response[i]]),
    }
    return LossReference(loss, out.gradient, out.token_loss, out.log_ratio, out.prefix, out.clip, stats)


def exact_log_probs(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs of the labels (0 at IGNORED_LABEL) and entropies, differentiable, in the dtype of the logits `[N, V]`.

    Columns from `vocab_size` on are padding.
    """
    table = (logits[:, :vocab_size] / temperature).log_softmax(1)
    own = table.gather(1, labels.clamp(min=0)[:, None]).squeeze(1)
    entropy = -(table.exp() * table.clamp(min=torch.finfo(table.dtype).min)).sum(1)
    return torch.where(labels == IGNORED_LABEL, 0.0, own), entropy


def log_probs_reference(
    logits: Tensor, labels: Tensor, temperature: float = 1.0, vocab_size: int | None = None, g: Tensor | None = None
) -> LogProbsReference:
    """The same in float64 with the gradient of sum_i g_i log_prob_i; g: `[N]`, default 1."""
    exact = logits.detach().double().requires_grad_()
    log_probs, entropy = exact_log_probs(exact, labels, temperature, vocab_size)
    (d_logits,) = torch.autograd.grad(log_probs, exact, torch.ones_like(log_probs) if g is None else g.double())
    return LogProbsReference(log_probs.detach(), entropy.detach(), d_logits)


def linear_ctpo_reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    old_log_probs: Numbers | None,
    response_mask: Tensor,
    advantages: Numbers,
    cu_seqlens: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    **loss_keywords: Any,
) -> LinearReference:
    """What `fused_linear_ctpo` computes: hidden `[N, H]`, weight `[V, H]`, the rest as `ctpo_loss_reference`.

    Autograd takes the gradient of the loss, which is a list of numbers, through the logits.
    """
    operands = tuple(operand.detach().double().requires_grad_() for operand in (hidden, weight))
    rows = [i for i in range(int(cu_seqlens[-1])) if response_mask[i] != 0]
    own, _ = exact_log_probs(operands[0][rows] @ operands[1].T, labels[rows], temperature, vocab_size)
    log_probs = torch.zeros(len(hidden), dtype=torch.float64)
    log_probs[rows] = own.detach()
    loss = ctpo_loss_reference(log_probs, old_log_probs, response_mask, advantages, cu_seqlens, **loss_keywords)
    gradient = torch.tensor(loss.gradient, dtype=torch.float64)[rows]
    return LinearReference(loss, log_probs, *torch.autograd.grad(own, operands, gradient))


def _list(values: Numbers) -> Row:
    return [float(x) for x in (values.tolist() if isinstance(values, Tensor) else values)]


def _sequence_of(bounds: list[int], n: int) -> list[int | None]:
    """The sequence of each token; None behind the last boundary."""
    owner: list[int | None] = [None] * n
    for sequence, (start, end) in enumerate(itertools.pairwise(bounds)):
        owner[start:end] = [sequence] * (end - start)
    return owner


def _per_token(values: Numbers, sequence_of: list[int | None], n: int) -> Row:
    """Values per token, or one for each sequence."""
    given = _list(values)
    if len(given) == n:
        return given
    return [0.0 if sequence is None else given[sequence] for sequence in sequence_of]


def _cut(d: float) -> float:
    if math.isnan(d):
        return d
    return max(-CUT, min(CUT, d))


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


def _window(mode: str, low: float, high: float, dual: float | None, scale: float) -> tuple[float, float, float | None]:
    """Bounds of log r (scaled by t^power), or of r itself."""
    dual = None if dual is None or dual < 0 else dual
    if mode == "log_power":
        return -low * scale, high * scale, None if dual is None else dual * scale
    return {"ratio": (1.0 - low, 1.0 + high, dual), "detached_ratio": (1.0 - low, 1.0 + high, None)}[mode]


def _largest(values: Row) -> float:
    """-inf of nothing; NaN wins."""
    return math.nan if any(math.isnan(x) for x in values) else max(values, default=-math.inf)
