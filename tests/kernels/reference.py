"""The loss and the log-probs once more, token by token in Python floats (64 bit), for tests.

Written from the formulas, not from the kernels: every sum is `math.fsum` over all its terms, nothing is carried along,
no tensor operation takes part. Slow by design: thousands of tokens, not millions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
    (A < 0), 3 beyond the dual bound (A < 0), 4 inside but above the cap. stats: by the names in SUMS and MAXIMA.
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
    """log_probs, entropy: `[N]`, nats. d_logits: `[N][V]`, derivative of sum_i g_i log_prob_i, 0 in padding columns."""

    log_probs: Row
    entropy: Row
    d_logits: list[Row]


@dataclass(frozen=True)
class LinearReference:
    """loss: of `log_probs` `[N]` (0 where masked). d_hidden `[N][H]`, d_weight `[V][H]`: its gradients."""

    loss: LossReference
    log_probs: Row
    d_hidden: list[Row]
    d_weight: list[Row]


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
            if a > 0 and x > high:
                code = 1
            elif a < 0 and x < low:
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
            out.gradient[i] = -a * r * weight[i] * share if code == 0 else 0.0
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


def log_probs_reference(
    logits: Tensor | Sequence[Row],
    labels: Numbers,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    g: Numbers | None = None,
) -> LogProbsReference:
    """log softmax(logits / temperature)[label] of each row, its entropy, and d (sum g log_probs) / d logits.

    logits: `[N][V]`; columns from `vocab_size` on are padding. labels: `[N]`; IGNORED_LABEL gives 0 and no gradient, a
    label outside the vocabulary NaN. g: `[N]`, default 1.
    """
    rows = [[float(x) for x in row] for row in (logits.tolist() if isinstance(logits, Tensor) else logits)]
    upstream = [1.0] * len(rows) if g is None else _list(g)
    out = LogProbsReference([], [], [])
    for row, label, factor in zip(rows, (int(x) for x in _list(labels)), upstream, strict=True):
        z = [x / temperature for x in row[:vocab_size]]
        top = max(z)
        if any(math.isnan(x) for x in z) or math.isinf(top):
            probabilities, log_total = [math.nan] * len(z), math.nan
        else:
            total = math.fsum(math.exp(x - top) for x in z)
            log_total = top + math.log(total)
            probabilities = [math.exp(x - top) / total for x in z]
        known = 0 <= label < len(z)
        log_probs = 0.0 if label == IGNORED_LABEL else z[label] - log_total if known else math.nan
        entropy = log_total - math.fsum(p * x for p, x in zip(probabilities, z, strict=True) if p != 0)
        slope = 0.0 if label == IGNORED_LABEL else factor / temperature
        onehot = [float(column == label) for column in range(len(z))]
        gradient = [slope * (hot - p) if slope != 0 else 0.0 for hot, p in zip(onehot, probabilities, strict=True)]
        out.log_probs.append(log_probs)
        out.entropy.append(entropy)
        out.d_logits.append(gradient + [0.0] * (len(row) - len(z)))
    return out


def linear_ctpo_reference(
    hidden: Tensor | Sequence[Row],
    weight: Tensor | Sequence[Row],
    labels: Numbers,
    old_log_probs: Numbers | None,
    response_mask: Numbers,
    advantages: Numbers,
    cu_seqlens: Numbers,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    **loss_keywords: Any,
) -> LinearReference:
    """What `fused_linear_ctpo` computes: hidden `[N][H]`, weight `[V][H]`, the rest as `ctpo_loss_reference`."""
    x = hidden.tolist() if isinstance(hidden, Tensor) else [list(row) for row in hidden]
    w = weight.tolist() if isinstance(weight, Tensor) else [list(row) for row in weight]
    response, all_labels = _list(response_mask), [int(label) for label in _list(labels)]
    width, bounds = len(w[0]), [int(b) for b in _list(cu_seqlens)]
    rows = [i for i in range(bounds[-1]) if response[i] != 0]
    logits = [[math.fsum(a * b for a, b in zip(x[i], column, strict=True)) for column in w] for i in rows]
    own_labels = [all_labels[i] for i in rows]
    found = log_probs_reference(logits, own_labels, temperature, vocab_size)
    log_probs = [0.0] * len(x)
    for i, value in zip(rows, found.log_probs, strict=True):
        log_probs[i] = value
    loss = ctpo_loss_reference(
        log_probs, old_log_probs, response_mask, advantages, cu_seqlens, **loss_keywords
    )  # d log_probs / d logits is taken once more below, with the loss's gradient as the upstream one
    upstream = [loss.gradient[i] for i in rows]
    d_logits = log_probs_reference(logits, own_labels, temperature, vocab_size, upstream).d_logits
    d_hidden = [[0.0] * width for _ in x]
    for i, dz in zip(rows, d_logits, strict=True):
        d_hidden[i] = [math.fsum(dz[v] * w[v][h] for v in range(len(w))) for h in range(width)]
    d_weight = [
        [math.fsum(dz[v] * x[i][h] for i, dz in zip(rows, d_logits, strict=True)) for h in range(width)]
        for v in range(len(w))
    ]
    return LinearReference(loss, log_probs, d_hidden, d_weight)


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
    return {"ratio": (1.0 - low, 1.0 + high, dual)}[mode]


def _largest(values: Row) -> float:
    """-inf of nothing; NaN wins."""
    return math.nan if any(math.isnan(x) for x in values) else max(values, default=-math.inf)
