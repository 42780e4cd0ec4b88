"""Sampler-trainer mismatch: its correction at the start of a batch, and metrics of one row of sums per sequence.

The correction gives importance weights and rejects tokens. Rows are gathered over ranks.

d = log-prob of the trainer minus log-prob of the sampler, in nats, clamped to +-20, over the sampled tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ctpo_megatron.config import CorrectionConfig, PolicyObjective, RejectConfig
from ctpo_megatron.objective.ratios import SequenceBounds, prefix_sum, sequence_sum, token_log_ratio

LIMIT = 20.0
"""A sum of log-ratios is clamped to this before exp (nats)."""


def per_sequence(values: Tensor, layout: SequenceBounds, reduce: Literal["sum", "min", "max"]) -> Tensor:
    """`[N]` or `[N, K]` -> `[B]` or `[B, K]`, in the order of the tokens for any packing; NaN propagates."""
    return torch.segment_reduce(values, reduce, offsets=layout.cu_seqlens, axis=0, unsafe=True)


class Columns:
    """Collects sums and extrema over the sampled tokens of every sequence, by name."""

    def __init__(self, layout: SequenceBounds, model: Tensor) -> None:
        self._layout, self._model = layout, model
        self._sums: dict[str, Tensor] = {}
        self._extrema: dict[str, Tensor] = {}
        self.add("tokens", model)

    @property
    def names(self) -> tuple[str, ...]:
        return (*self._sums, *self._extrema)

    def table(self) -> Tensor:
        """float64 `[B, len(names)]`."""
        sums = per_sequence(torch.stack(list(self._sums.values()), dim=1), self._layout, "sum")
        return torch.cat([sums, *(column[:, None] for column in self._extrema.values())], dim=1)

    def add(self, name: str, values: Tensor) -> None:
        """Sum of `values` `[N]`."""
        self._sums[name] = torch.where(self._model, values.double(), 0.0)

    def add_extrema(self, name: str, values: Tensor) -> None:
        """`<name>_min` and `<name>_max` of `values` `[N]`."""
        for end, nothing in (("min", math.inf), ("max", -math.inf)):
            masked = torch.where(self._model, values.double(), nothing)
            self._extrema[f"{name}_{end}"] = per_sequence(masked, self._layout, end)  # type: ignore[arg-type]

    def add_log_probs(self, trainer: Tensor, sampler: Tensor, d: Tensor) -> None:
        """Add the inputs of the divergences."""
        d = d.double()
        columns = {"trainer": trainer, "sampler": sampler, "d": d, "d_squared": d.square()}
        for name, values in (columns | {"ratio": d.exp(), "ratio_squared": (2 * d).exp()}).items():
            self.add(name, values.reshape(-1))

    def add_weights(self, log_weight: Tensor, weights: Tensor, cap: float) -> None:
        """Sums of weights `[N]` capped at `cap`, and of the weights before the cap."""
        wide = weights.double()
        columns = {"weight": wide, "weight_squared": wide.square(), "raw": log_weight.double().clamp(max=LIMIT).exp()}
        columns |= {"above": log_weight > math.log(cap), "below": log_weight < -math.log(cap)}
        for name, values in columns.items():
            self.add(name, values)
        self.add_extrema("weight", wide)

    def add_statistic(self, name: str, values: Tensor, low: Tensor, high: Tensor) -> None:
        """Sums of a statistic `[N]`, and of the tokens that are below and above its bounds."""
        for part, column in (("sum", values), ("low", low), ("high", high)):
            self.add(f"{name}_{part}", column)
        self.add_extrema(name, values)


CorrectionKind = Literal["token", "sequence", "prefix"]


@dataclass(frozen=True)
class Corrected:
    """A packed micro-batch after its correction. Everything is detached.

    weights: `[N]`, w_t before normalization, 1 where response_mask is 0; None without weights. loss_mask: bool `[N]`,
    after rejection. table: float64 `[B, columns]` of `names`, one row per sequence (`per_sequence`); only where
    something can be rejected has it the tokens `rejected`.
    """

    weights: Tensor | None
    loss_mask: Tensor
    table: Tensor
    names: tuple[str, ...]


@torch.no_grad()
def correct(
    config: CorrectionConfig,
    proximal_log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
) -> Corrected:
    """Weights, rejection and statistics of packed sequences; all tensors `[N]`, cu_seqlens `[B + 1]`.

    With d_t = proximal_t - rollout_t over model tokens, |d_t| <= 20, the weights by `config.level` are:

        token      min(cap, exp d_t)
        sequence   min(cap, exp sum_t d_t)      one weight for the whole sequence
        prefix     min(cap, exp sum_{k<=t} d_k) tokens up to t only: the causal form that fits CTPO

    Rejection and veto change the loss mask alone, not the positions and prefix sums of other tokens. A NaN rejects
    nothing, so that it shows in the loss. Nothing is read back from the device.
    """
    layout = SequenceBounds.of(proximal_log_probs, cu_seqlens)
    model, trained = layout.mask(response_mask, "response_mask"), layout.mask(loss_mask, "loss_mask")
    d = _difference(proximal_log_probs, rollout_log_probs, model, layout)
    columns = Columns(layout, model)
    columns.add_log_probs(proximal_log_probs, rollout_log_probs, d)
    weights = None
    if config.level != "none":
        log_weight = _log_weight(config.level, d, layout)
        # Clamped in log space: exp of a long sum would overflow.
        truncated = log_weight.clamp(max=math.log(config.cap)).exp()
        weights = torch.where(model, truncated.to(d.dtype), 1.0)
        columns.add_weights(log_weight, weights, config.cap)
    rejected: list[Tensor] = []
    for reject in config.reject:
        values = _statistic(reject, d.double(), model, layout)
        low = torch.zeros_like(model) if reject.low is None else model & (values < reject.low)
        high = torch.zeros_like(model) if reject.high is None else model & (values > reject.high)
        columns.add_statistic(option_name(reject), values, low, high)
        rejected += [low, high]
    if config.veto is not None:
        vetoed = model & layout.to_tokens(per_sequence(d.double(), layout, "min") < math.log(config.veto))
        columns.add("vetoed", vetoed)
        rejected.append(vetoed)
    if rejected:
        any_rejected = torch.stack(rejected).any(0)
        trained = trained & ~any_rejected
        columns.add("rejected", any_rejected)
    columns.add("left", trained)
    return Corrected(weights, trained, columns.table(), columns.names)


def _difference(proximal: Tensor, rollout: Tensor, model: Tensor, layout: SequenceBounds) -> Tensor:
    """d_t `[N]`, float64 for float64 inputs, else float32."""
    dtype = proximal.dtype if proximal.dtype == torch.float64 else torch.float32
    found = (layout.values(proximal, "proximal_log_probs", dtype), layout.values(rollout, "rollout_log_probs", dtype))
    return token_log_ratio(*found, model)


def _log_weight(kind: CorrectionKind, d: Tensor, layout: SequenceBounds) -> Tensor:
    match kind:
        case "token":
            return d
        case "sequence":
            return sequence_sum(d, layout)
        case "prefix":
            return prefix_sum(d, layout)


def _statistic(reject: RejectConfig, d: Tensor, model: Tensor, layout: SequenceBounds) -> Tensor:
    """`[N]`, float64: the statistic of each token or of its sequence."""
    values = {"k1": lambda: -d, "k2": lambda: 0.5 * d.square(), "k3": lambda: d.exp() - 1 - d}[reject.stat]()
    match reject.over:
        case "token":
            return values
        case "sequence_max":
            return layout.to_tokens(per_sequence(torch.where(model, values, -math.inf), layout, "max"))
        case "sequence_sum":
            return layout.to_tokens(per_sequence(values, layout, "sum"))
        case "sequence_mean":
            tokens = per_sequence(model.double(), layout, "sum").clamp(min=1)
            return layout.to_tokens(per_sequence(values, layout, "sum") / tokens)


class MismatchRows:
    """The rows of all sequences of a batch that have a sampled token; on the host."""

    def __init__(self, table: Tensor, names: Sequence[str]) -> None:
        self._columns = dict(zip(names, table[table[:, 0] > 0].T, strict=True))
        self.tokens = float(self["tokens"].sum())

    def __getitem__(self, name: str) -> Tensor:
        column: Tensor = self._columns[name]
        return column

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def __len__(self) -> int:
        return self["tokens"].numel()

    def token_mean(self, name: str) -> float:
        """Mean over the sampled tokens of the batch."""
        return float(self[name].sum()) / self.tokens

    def means(self, name: str) -> Tensor:
        """`[B]`: mean over the sampled tokens of each sequence."""
        return self[name] / self["tokens"]


def correction_metrics(rows: MismatchRows, config: CorrectionConfig) -> dict[str, float]:
    """`rollout_corr/*` of a batch, named and defined as verl's where it has the quantity; nothing for an empty batch.

    Always the divergences of the two log-probs; `rollout_is_*` with weights (before normalization), `rollout_rs_*` with
    rejection.
    """
    if not len(rows):
        return {}
    found = _divergences(rows)
    if config.level != "none":
        found |= {f"rollout_is_{name}": value for name, value in _weight_statistics(rows, config).items()}
    if "rejected" in rows:
        found |= _rejection_statistics(rows, config)
    return {f"rollout_corr/{name}": float(value) for name, value in found.items()}


def _divergences(rows: MismatchRows) -> dict[str, Tensor | float]:
    trainer, sampler, total = rows.means("trainer"), rows.means("sampler"), rows["d"].clamp(-LIMIT, LIMIT)
    difference = sampler - trainer
    return {
        "training_ppl": (-trainer).exp().mean(),
        "training_log_ppl": -trainer.mean(),
        "rollout_ppl": (-sampler).exp().mean(),
        "rollout_log_ppl": -sampler.mean(),
        "log_ppl_diff": difference.mean(),
        "log_ppl_abs_diff": difference.abs().mean(),
        "log_ppl_diff_max": difference.max(),
        "log_ppl_diff_min": difference.min(),
        "ppl_ratio": difference.exp().mean(),
        "kl": -rows.token_mean("d"),
        "k3_kl": rows.token_mean("ratio") - 1 - rows.token_mean("d"),
        "chi2_token": rows.token_mean("ratio_squared") - 1,
        "chi2_seq": (2 * total).exp().mean() - 1,
        "eff_sample_size": total.exp().mean().square() / (2 * total).exp().mean(),
    }


def _weight_statistics(rows: MismatchRows, config: CorrectionConfig) -> dict[str, Tensor | float]:
    means, mean, square = rows.means("weight"), rows.token_mean("weight"), rows.token_mean("weight_squared")
    per_token = config.level != "sequence"
    raw, above = rows.means("raw"), rows["above"] > 0
    found: dict[str, Tensor | float] = {
        "mean": mean,
        "std": math.sqrt(max(0.0, square - mean**2)),
        "max": rows["weight_max"].max() if per_token else raw.max(),
        "min": rows["weight_min"].min() if per_token else raw.min(),
        "eff_sample_size": mean**2 / square if square else 0.0,
        "ratio_fraction_high": rows.token_mean("above") if per_token else above.double().mean(),
        "ratio_fraction_low": rows.token_mean("below") if per_token else (rows["below"] > 0).double().mean(),
        "seq_mean": means.mean(),
        "seq_std": means.std() if len(rows) > 1 else 0.0,
        "seq_max": means.max(),
        "seq_min": means.min(),
        "seq_max_deviation": (means - 1).abs().max(),
        "seq_fraction_high": (raw > config.cap).double().mean(),
        "seq_fraction_low": (raw < 1 / config.cap).double().mean(),
    }
    if config.normalize:
        found["batch_norm_factor"] = weight_mean(rows, config)
    return found


def weight_mean(rows: MismatchRows, config: CorrectionConfig) -> float:
    """Return the divisor of `normalize`: the mean weight over tokens, or over sequences where each has one weight.

    1 without weights, and when all of them are 0.
    """
    if config.level == "none" or not len(rows):
        return 1.0
    mean = float(rows.means("weight").mean()) if config.level == "sequence" else rows.token_mean("weight")
    return 1.0 if mean <= 1e-8 else mean


def _rejection_statistics(rows: MismatchRows, config: CorrectionConfig) -> dict[str, Tensor | float]:
    found: dict[str, Tensor | float] = {
        "rollout_rs_masked_fraction": rows.token_mean("rejected"),
        "rollout_rs_seq_masked_fraction": _share(rows["rejected"]),
    }
    for option in map(option_name, config.reject):
        name, low, high = f"rollout_rs_{option}", rows[f"{option}_low"], rows[f"{option}_high"]
        by_token = option.startswith("token")
        found |= {
            f"{name}_mean": rows.token_mean(f"{option}_sum"),
            f"{name}_max": rows[f"{option}_max"].max(),
            f"{name}_min": rows[f"{option}_min"].min(),
            f"{name}_fraction_high": rows.token_mean(f"{option}_high") if by_token else _share(high),
            f"{name}_fraction_low": rows.token_mean(f"{option}_low") if by_token else _share(low),
            f"{name}_masked_fraction": float((low + high).sum()) / rows.tokens,
            f"{name}_seq_masked_fraction": _share(low + high),
        }
    if config.veto is not None:
        found["rollout_is_veto_fraction"] = _share(rows["vetoed"])
    return found


def option_name(reject: RejectConfig) -> str:
    """Return the name of a rejection rule in metrics: token_k1, seq_sum_k1, seq_mean_k3, seq_max_k2, ..."""
    return f"{reject.over.replace('sequence', 'seq')}_{reject.stat}"


def _share(counts: Tensor) -> float:
    """Share of sequences with a count above 0."""
    return float((counts > 0).double().mean())


def noise_metrics(rows: MismatchRows, objective: PolicyObjective) -> dict[str, float]:
    """`mismatch/*`: the effect of the difference on ratios against the sampler, if it were noise.

    sigma, bias: standard deviation and mean of d. If the sampler draws from the distribution that it reports, the mean
    of exp d is 1, so noise has the mean -sigma^2 / 2. With every token, log r_t drifts down by that mean and spreads by
    sigma.
    band_share: the spread at the mean length of a response, over the distance of the lower bound. t_star: where the
    drift alone crosses the lower bound, in sampled tokens; absent where it never does.
    """
    if not len(rows):
        return {}
    bias = rows.token_mean("d")
    variance = max(0.0, rows.token_mean("d_squared") - bias**2)
    found = {"sigma": math.sqrt(variance), "bias": bias}
    width, power = _lower_bound(objective)
    if math.isfinite(width) and width > 0 and variance > 0:
        length = rows.tokens / len(rows)
        spread = found["sigma"] * length ** _SPREAD[objective.ratio_mode]
        found["band_share"] = spread / (width * length**power)
        growth = _DRIFT[objective.ratio_mode] - power
        drift = variance - objective.clip_drift  # away from the centre of the window
        if growth > 0 and drift > 0:
            found["t_star"] = math.exp(min(math.log(2 * width / drift) / growth, _LOG_FAR))
    return {f"mismatch/{name}": value for name, value in found.items()}


_LOG_FAR = math.log(1e18)
"""Upper bound of a position: for small noise it would overflow."""
_DRIFT = {"cumprod": 1.0, "sequence": 1.0, "geomean": 0.0, "token": 0.0, "sequence-geomean": 0.0}
"""The mean of log r_t grows like t to this power, ..."""
_SPREAD = {"cumprod": 0.5, "sequence": 0.5, "geomean": -0.5, "token": 0.0, "sequence-geomean": -0.5}
"""... its standard deviation like t to this one, ..."""


def _lower_bound(objective: PolicyObjective) -> tuple[float, float]:
    """... and its lower bound is -width t^power: (width in nats, power)."""
    if objective.clip_mode == "log_power":
        return objective.clip_low, objective.clip_power
    if objective.clip_mode not in ("ratio", "detached_ratio"):
        return math.inf, 0.0
    return (-math.log1p(-objective.clip_low) if objective.clip_low < 1 else math.inf), 0.0
