"""Correction weights, rejection and their metrics once more, sequence by sequence in Python floats (64 bit)."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

from ctpo_megatron.config import CorrectionConfig, RejectConfig


@dataclass
class Trajectory:
    """Log-probs of trainer and sampler, and what the policy sampled; one entry a token."""

    trainer: list[float]
    sampler: list[float]
    model: list[int]

    @property
    def d(self) -> list[float]:
        """Over the sampled tokens."""
        pairs = zip(self.trainer, self.sampler, self.model, strict=True)
        return [max(-20.0, min(20.0, a - b)) for a, b, m in pairs if m]


@dataclass
class Expected:
    """weights, kept: one list a sequence, one entry a sampled token. metrics: without `rollout_corr/`."""

    weights: list[list[float]] = field(default_factory=list)
    kept: list[list[bool]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


def reference(batch: list[Trajectory], config: CorrectionConfig) -> Expected:
    """Of a whole rollout batch."""
    out = Expected()
    raw = [_raw(t.d, config.level) for t in batch]
    out.weights = [[min(config.cap, w) for w in ws] for ws in raw]
    tokens = [w for ws in out.weights for w in ws]
    out.metrics = _divergences(batch)
    if config.level != "none":
        out.metrics |= {f"rollout_is_{k}": v for k, v in _weights(out.weights, raw, config).items()}
    if config.normalize:
        mean = statistics.fmean(ws[0] for ws in out.weights) if config.level == "sequence" else statistics.fmean(tokens)
        out.weights = [[w / mean for w in ws] for ws in out.weights]
        out.metrics["rollout_is_batch_norm_factor"] = mean
    reasons = [[_rejected(t.d, reject) for t in batch] for reject in config.reject]
    vetoed = [config.veto is not None and min(math.exp(x) for x in t.d) < config.veto for t in batch]
    for i, t in enumerate(batch):
        out.kept.append([not vetoed[i] and not any(reason[i][k] for reason in reasons) for k in range(len(t.d))])
    if config.rejects:
        gone = [[not k for k in kept] for kept in out.kept]
        out.metrics["rollout_rs_masked_fraction"] = statistics.fmean(x for g in gone for x in g)
        out.metrics["rollout_rs_seq_masked_fraction"] = statistics.fmean(any(g) for g in gone)
        for reject, reason in zip(config.reject, reasons, strict=True):
            name = f"rollout_rs_{reject.over.replace('sequence', 'seq')}_{reject.stat}"
            out.metrics[f"{name}_masked_fraction"] = statistics.fmean(x for r in reason for x in r)
            out.metrics[f"{name}_seq_masked_fraction"] = statistics.fmean(any(r) for r in reason)
            values = [_values(t.d, reject) for t in batch]
            flat = [v for vs in values for v in vs]
            judged = flat if reject.over == "token" else [vs[0] for vs in values]
            low, high = (
                (-math.inf if reject.low is None else reject.low),
                math.inf if reject.high is None else reject.high,
            )
            out.metrics |= {
                f"{name}_mean": statistics.fmean(flat),
                f"{name}_max": max(flat),
                f"{name}_min": min(flat),
                f"{name}_fraction_high": statistics.fmean(v > high for v in judged),
                f"{name}_fraction_low": statistics.fmean(v < low for v in judged),
            }
    if config.veto is not None:
        out.metrics["rollout_is_veto_fraction"] = statistics.fmean(vetoed)
    return out


def _raw(d: list[float], level: str) -> list[float]:
    sums = {"none": lambda t: 0.0, "token": lambda t: d[t], "sequence": lambda t: math.fsum(d)}
    log = sums.get(level, lambda t: math.fsum(d[: t + 1]))
    return [math.exp(min(20.0, log(t))) for t in range(len(d))]


def _values(d: list[float], reject: RejectConfig) -> list[float]:
    """The statistic that decides about each token."""
    token = [{"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[reject.stat] for x in d]
    if reject.over == "token":
        return token
    whole = {"sequence_sum": math.fsum, "sequence_mean": statistics.fmean, "sequence_max": max}[reject.over](token)
    return [whole] * len(d)


def _rejected(d: list[float], reject: RejectConfig) -> list[bool]:
    low, high = reject.low, reject.high
    return [(low is not None and v < low) or (high is not None and v > high) for v in _values(d, reject)]


def _divergences(batch: list[Trajectory]) -> dict[str, float]:
    def means(name: str) -> list[float]:
        return [statistics.fmean(x for x, m in zip(getattr(t, name), t.model, strict=True) if m) for t in batch]

    trainer, sampler, d = means("trainer"), means("sampler"), [x for t in batch for x in t.d]
    difference = [b - a for a, b in zip(trainer, sampler, strict=True)]
    mean = statistics.fmean
    return {
        "training_ppl": mean(math.exp(-x) for x in trainer),
        "training_log_ppl": -mean(trainer),
        "rollout_ppl": mean(math.exp(-x) for x in sampler),
        "rollout_log_ppl": -mean(sampler),
        "log_ppl_diff": mean(difference),
        "log_ppl_abs_diff": mean(map(abs, difference)),
        "log_ppl_diff_max": max(difference),
        "log_ppl_diff_min": min(difference),
        "ppl_ratio": mean(map(math.exp, difference)),
        "kl": -mean(d),
        "k3_kl": mean(math.exp(x) - 1 - x for x in d),
        "chi2_token": mean(math.exp(2 * x) for x in d) - 1,
        "chi2_seq": mean(math.exp(2 * max(-20.0, min(20.0, math.fsum(t.d)))) for t in batch) - 1,
        "eff_sample_size": mean(math.exp(max(-20.0, min(20.0, math.fsum(t.d)))) for t in batch) ** 2
        / mean(math.exp(2 * max(-20.0, min(20.0, math.fsum(t.d)))) for t in batch),
    }


def _weights(weights: list[list[float]], raw: list[list[float]], config: CorrectionConfig) -> dict[str, float]:
    tokens, of_tokens = [w for ws in weights for w in ws], [w for ws in raw for w in ws]
    means, raw_means = [statistics.fmean(ws) for ws in weights], [statistics.fmean(ws) for ws in raw]
    mean, square = statistics.fmean(tokens), statistics.fmean(w * w for w in tokens)
    whole = config.level == "sequence"
    judged = raw_means if whole else of_tokens
    return {
        "mean": mean,
        "std": statistics.pstdev(tokens),
        "max": max(judged) if whole else max(tokens),
        "min": min(judged) if whole else min(tokens),
        "eff_sample_size": mean * mean / square,
        "ratio_fraction_high": statistics.fmean(w > config.cap for w in judged),
        "ratio_fraction_low": statistics.fmean(w < 1 / config.cap for w in judged),
        "seq_mean": statistics.fmean(means),
        "seq_std": statistics.stdev(means) if len(means) > 1 else 0.0,
        "seq_max": max(means),
        "seq_min": min(means),
        "seq_max_deviation": max(abs(m - 1) for m in means),
        "seq_fraction_high": statistics.fmean(w > config.cap for w in raw_means),
        "seq_fraction_low": statistics.fmean(w < 1 / config.cap for w in raw_means),
    }
