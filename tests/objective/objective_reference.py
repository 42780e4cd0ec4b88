"""The loss once more, token by token in Python floats (64 bit), written from the formulas and not from the package."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

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
    high: int = 0
    low: int = 0
    dual: int = 0


def reference(batch: list[Sequence], o: PolicyObjective) -> Expected:
    """Loss, token losses, gradient and clip counts of a whole step."""
    out = Expected()
    tokens = max(1, sum(sum(s.loss) for s in batch))
    sequences = max(1, sum(1 for s in batch if o.count_masked_sequences or sum(s.loss)))
    for s in batch:
        d = [max(-20.0, min(20.0, a - b)) if m else 0.0 for a, b, m in zip(s.log_probs, s.anchor, s.model, strict=True)]
        total, length = math.fsum(d), max(1, sum(s.model))
        losses, gradients = [0.0] * len(s), [0.0] * len(s)
        for i in range(len(s)):
            if not s.loss[i]:
                continue
            t, prefix, a = sum(s.model[: i + 1]), math.fsum(d[: i + 1]), s.advantage[i]
            raw = {
                "cumprod": prefix,
                "geomean": prefix / t,
                "token": d[i],
                "sequence": total,
                "sequence-geomean": total / length,
            }[o.ratio_mode]
            log_r = min(raw, 10.0)
            r = math.exp(log_r)
            if o.clip_mode == "log_power":
                scale = t**o.clip_power
                bounded = math.exp(max(-o.clip_low * scale, min(o.clip_high * scale, log_r)))
                too_high, too_low = log_r > o.clip_high * scale, log_r < -o.clip_low * scale
                far = o.clip_c is not None and log_r > o.clip_c * scale
                dual_ratio = None if o.clip_c is None else math.exp(o.clip_c * scale)
            else:
                bounded = max(1 - o.clip_low, min(1 + o.clip_high, r))
                too_high, too_low = r > 1 + o.clip_high, r < 1 - o.clip_low
                far = o.clip_c is not None and r > o.clip_c
                dual_ratio = o.clip_c
            value = max(-a * r, -a * bounded)
            if a < 0 and dual_ratio is not None:
                value = min(value, -a * dual_ratio)
            cut = [a > 0 and too_high, a < 0 and too_low, a < 0 and far]
            slope = 0.0 if any(cut) or raw > 10 else -a * r
            if o.clip_mode == "detached_ratio":
                cut, slope = [a != 0 and too_high, a != 0 and too_low, False], -a * bounded
                value = slope * s.log_probs[i]
            out.high, out.low, out.dual = out.high + cut[0], out.low + cut[1], out.dual + cut[2]
            out.ratio.append(r)
            losses[i] = value * s.weight[i]
            share = {
                "token-mean": 1 / tokens,
                "seq-mean-token-mean": 1 / (sequences * max(1, sum(s.loss))),
                "seq-mean-token-sum": 1 / (sequences * o.loss_scale_factor),
            }[o.loss_agg_mode]
            out.loss += losses[i] * share
            gradients[i] = slope * s.weight[i] * share
        out.per_token.append(losses)
        out.gradient.append(gradients)
    return out


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
        log_probs = anchor + spread * torch.randn(n, generator=g, dtype=torch.float64)
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
