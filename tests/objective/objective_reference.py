"""The loss once more, token by token in Python floats (64 bit), written from the formulas and not from the package."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ctpo_megatron.config import PrefixBudget
from ctpo_megatron.objective import PolicyObjective


@dataclass
class Sequence:
    """One trajectory; every list has one entry per token."""

    log_probs: list[float]
    anchor: list[float]
    advantage: list[float]
    model: list[int]
    loss: list[int]
    weight: list[float]

    def __len__(self) -> int:
        return len(self.log_probs)


@dataclass
class Expected:
    loss: float = 0.0
    per_token: list[list[float]] = field(default_factory=list)
    gradient: list[list[float]] = field(default_factory=list)  # of the aggregated loss, in log_probs
    ratio: list[float] = field(default_factory=list)  # over loss tokens
    share: list[float] = field(default_factory=list)  # of a loss token in the aggregated loss
    high: int = 0
    low: int = 0
    dual: int = 0
    cut: list[list[list[bool]]] = field(default_factory=list)  # of each token: high, low, dual


@dataclass
class Token:
    """Token i of a sequence: its advantage, position t, and log r before the cap."""

    i: int
    a: float
    t: int
    raw: float
    r: float


Part = tuple[float, float, list[bool]]
"""Loss of a token, its derivative in the log-prob, and whether it is cut high, low, dual."""


def reference(batch: list[Sequence], o: PolicyObjective) -> Expected:
    """Loss, token losses, gradient and clip counts of a whole step."""
    out = Expected()
    for s in batch:
        d, share = differences(s), share_of(s, batch, o)
        losses, gradients, cuts = [0.0] * len(s), [0.0] * len(s), [[False] * 3] * len(s)
        for i in range(len(s)):
            if not s.loss[i]:
                continue
            raw = log_ratio(o.ratio_mode, d, s.model, i)
            token = Token(i, s.advantage[i], sum(s.model[: i + 1]), raw, math.exp(min(raw, 10.0)))
            value, slope, cut = PARTS[o.clip_mode](token, s, d, o)
            out.high, out.low, out.dual = out.high + cut[0], out.low + cut[1], out.dual + cut[2]
            cuts[i] = cut
            out.ratio.append(token.r)
            losses[i] = value * s.weight[i]
            out.loss += losses[i] * share
            out.share.append(share)
            gradients[i] = slope * s.weight[i] * share
        out.per_token.append(losses)
        out.gradient.append(gradients)
        out.cut.append(cuts)
    return out


def share_of(s: Sequence, batch: list[Sequence], o: PolicyObjective) -> float:
    """Of a loss token of this sequence in the aggregated loss."""
    sequences = max(1, sum(1 for each in batch if o.count_masked_sequences or any(each.loss)))
    return {
        "token-mean": 1 / max(1, sum(sum(each.loss) for each in batch)),
        "seq-mean-token-mean": 1 / (sequences * max(1, sum(s.loss))),
        "seq-mean-token-sum": 1 / (sequences * o.loss_scale_factor),
    }[o.loss_agg_mode]


def differences(s: Sequence) -> list[float]:
    return [max(-20.0, min(20.0, a - b)) if m else 0.0 for a, b, m in zip(s.log_probs, s.anchor, s.model, strict=True)]


def log_ratio(mode: str, d: list[float], model: list[int], i: int) -> float:
    return {
        "cumprod": math.fsum(d[: i + 1]),
        "geomean": math.fsum(d[: i + 1]) / max(1, sum(model[: i + 1])),
        "token": d[i],
        "sequence": math.fsum(d),
        "sequence-geomean": math.fsum(d) / max(1, sum(model)),
    }[mode]


def clipped(token: Token, s: Sequence, d: list[float], o: PolicyObjective) -> Part:
    a, r, log_r = token.a, token.r, min(token.raw, 10.0)
    if o.clip_mode == "log_power":
        scale, centre = token.t**o.clip_power, -token.t * o.clip_drift / 2
        low, high = centre - o.clip_low * scale, centre + o.clip_high * scale
        bounded = math.exp(max(low, min(high, log_r)))
        too_high, too_low = log_r > high, log_r < low
        far = o.clip_c is not None and log_r > centre + o.clip_c * scale
        dual_ratio = None if o.clip_c is None else math.exp(centre + o.clip_c * scale)
    else:
        bounded = max(1 - o.clip_low, min(1 + o.clip_high, r))
        too_high, too_low = r > 1 + o.clip_high, r < 1 - o.clip_low
        far = o.clip_c is not None and r > o.clip_c
        dual_ratio = o.clip_c
    if o.clip_mode == "detached_ratio":
        return -a * bounded * s.log_probs[token.i], -a * bounded, [a != 0 and too_high, a != 0 and too_low, False]
    value = max(-a * r, -a * bounded)
    if a < 0 and dual_ratio is not None:
        value = min(value, -a * dual_ratio)
    cut = [a > 0 and too_high, a < 0 and too_low, a < 0 and far]
    return value, 0.0 if any(cut) or token.raw > 10 else -a * r, cut


def gated(token: Token, s: Sequence, d: list[float], o: PolicyObjective) -> Part:
    """SAPO: d sigmoid(x) / dx = sigmoid(x) (1 - sigmoid(x))."""
    tau = o.tau_positive if token.a > 0 else o.tau_negative
    sigmoid = 1 / (1 + math.exp(-tau * (token.r - 1))) if tau * (token.r - 1) > -700 else 0.0
    slope = 0.0 if token.raw > 10 else -4 * token.a * sigmoid * (1 - sigmoid) * token.r
    return -token.a * 4 / tau * sigmoid, slope, [False] * 3


def bounded_tokens(token: Token, s: Sequence, d: list[float], o: PolicyObjective) -> Part:
    """GMPO, one sign a sequence: that of most of its advantages."""
    sign = sum((a > 0) - (a < 0) for a, l in zip(s.advantage, s.loss, strict=True) if l)  # noqa: E741
    bounds = (-math.inf if sign >= 0 else -o.clip_low, math.inf if sign <= 0 else o.clip_high)
    c = [min(max(x, bounds[0]), bounds[1]) for x in d]
    raw, own = log_ratio(o.ratio_mode, c, s.model, token.i), d[token.i]
    value, inside = -token.a * math.exp(min(raw, 10.0)), c[token.i] == own and raw <= 10
    return value, value if inside else 0.0, [own > bounds[1], own < bounds[0], False]


def trust_region(token: Token, s: Sequence, d: list[float], o: PolicyObjective) -> Part:
    """DPPO, CPPO and TRM."""
    i, a = token.i, token.a
    out = {
        "binary_tv": lambda: abs(probability_moved(s, i)) > delta_of(o, a) and a * d[i] > 0,
        "binary_kl": lambda: binary_kl(s, i) > delta_of(o, a) and a * d[i] > 0,
        "prefix_tv": lambda: over_budget(s, i, delta_of(o, a), o) and a * d[i] > 0,
        "sequence_k3": lambda: distant(s, d, o),
    }[o.clip_mode]()
    cut = [out and a > 0, out and a < 0, False]
    if o.clip_mode in ("prefix_tv", "sequence_k3"):
        value = 0.0 if out else -a * token.r
        return value, 0.0 if token.raw > 10 else value, cut
    limit = math.inf if o.clip_c is None else o.clip_c
    slope = 0.0 if out else -a * min(token.r, limit)
    return slope * s.log_probs[i], slope, [*cut[:2], not out and a != 0 and token.r > limit]


def delta_of(o: PolicyObjective, a: float) -> float:
    return o.clip_high if a > 0 else o.clip_low


def probability_moved(s: Sequence, i: int) -> float:
    return math.exp(s.log_probs[i]) - math.exp(s.anchor[i])


def binary_kl(s: Sequence, i: int) -> float:
    p, mu = math.exp(s.log_probs[i]), math.exp(s.anchor[i])
    return mu * math.log(mu / p) + (1 - mu) * math.log((1 - mu + 1e-8) / (1 - p + 1e-8))


def over_budget(s: Sequence, i: int, delta: float, o: PolicyObjective) -> bool:
    places = [k for k in range(len(s)) if s.model[k]]
    w = {k: 1 - (1 - o.prefix_weight) * n / max(len(places) - 1, 1) for n, k in enumerate(places)}
    z = {k: w[k] * abs(probability_moved(s, k)) for k in places}
    before = [k for k in places if k < i]
    budget = o.prefix_budget
    if isinstance(budget, PrefixBudget):
        budget = max(budget.min, quantile([abs(probability_moved(s, k)) for k in places], budget.quantile))
    room = delta + budget * sum(w[k] for k in before) - math.fsum(z[k] for k in before)
    return z[i] > min(delta, room)


def quantile(values: list[float], share: float) -> float:
    """Linear between the two nearest ranks."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (place - math.floor(place)) * (high - low)


def distant(s: Sequence, d: list[float], o: PolicyObjective) -> bool:
    k3 = [math.exp(x) - 1 - x for x, m in zip(d, s.model, strict=True) if m]
    return sum(k3) / len(k3) > o.clip_high or (o.clip_c is not None and max(k3) > o.clip_c)


PARTS = {
    "log_power": clipped,
    "ratio": clipped,
    "detached_ratio": clipped,
    "sigmoid": gated,
    "token_log": bounded_tokens,
    "binary_tv": trust_region,
    "binary_kl": trust_region,
    "prefix_tv": trust_region,
    "sequence_k3": trust_region,
}


def random_batch(seed: int, lengths: list[int], spread: float) -> list[Sequence]:
    """Sequences with prompt, observation gaps, rejected tokens, mixed signs, zero advantages and weights."""
    g = torch.Generator().manual_seed(seed)

    def uniform(n: int) -> Tensor:
        return torch.rand(n, generator=g, dtype=torch.float64)

    batch = []
    for n in lengths:
        model = (uniform(n) < 0.75).int()
        loss = model * (uniform(n) < 0.85).int()
        anchor = -3 * uniform(n)
        log_probs = -(anchor + spread * torch.randn(n, generator=g, dtype=torch.float64)).abs()  # of a probability
        advantage = torch.randn(n, generator=g, dtype=torch.float64) * (uniform(n) < 0.9)
        columns = (log_probs, anchor, advantage, model, loss, 0.5 + uniform(n))
        batch.append(Sequence(*(column.tolist() for column in columns)))
    return batch


def packed(batch: list[Sequence], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Keyword arguments of `policy_loss` for the sequences one after the other."""
    names = {
        "log_probs": "log_probs",
        "old_log_probs": "anchor",
        "advantages": "advantage",
        "response_mask": "model",
        "loss_mask": "loss",
        "weights": "weight",
    }
    columns = {k: torch.tensor([x for s in batch for x in getattr(s, v)], dtype=dtype) for k, v in names.items()}
    ends = torch.tensor([0] + [len(s) for s in batch]).cumsum(0)
    return {**columns, "cu_seqlens": ends.to(torch.int32)}


def padded(batch: list[Sequence], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The same as `[B, T]`, with NaN in every padded slot that is not a mask."""
    width = max((len(s) for s in batch), default=0) + 2
    flat = packed(batch, dtype)
    ends = flat.pop("cu_seqlens").tolist()
    out = {}
    for name, values in flat.items():
        table = torch.full((len(batch), width), 0.0 if "mask" in name else torch.nan, dtype=dtype)
        for row, (start, end) in enumerate(itertools.pairwise(ends)):
            table[row, : end - start] = values[start:end]
        out[name] = table
    return out
