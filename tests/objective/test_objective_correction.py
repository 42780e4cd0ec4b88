"""Correction of sampler against trainer: weights, rejection, metrics and the loss against Python; noise injected."""

from __future__ import annotations

import functools
import math
import random

import pytest
import torch

from ctpo_megatron.config import CorrectionConfig, RejectConfig
from ctpo_megatron.objective import (
    MismatchRows,
    PolicyObjective,
    correct,
    correction_metrics,
    noise_metrics,
    weight_mean,
)
from tests.objective.correction_reference import Expected, Trajectory, reference

HIGHS = {
    "token": {"k1": 0.15, "k2": 0.02, "k3": 0.015},
    "sequence_sum": {"k1": 0.3, "k2": 0.08, "k3": 0.07},
    "sequence_mean": {"k1": 0.02, "k2": 0.007, "k3": 0.006},
    "sequence_max": {"k2": 0.02, "k3": 0.015},
}


def rejecting(over: str, **highs: float) -> CorrectionConfig:
    lows = {"token": -0.15, "sequence_sum": -0.3, "sequence_mean": -0.05}
    reasons = [
        RejectConfig(stat=stat, over=over, low=lows[over] if stat == "k1" else None, high=high)
        for stat, high in highs.items()
    ]
    return CorrectionConfig(reject=tuple(reasons))


CONFIGS = {
    **{level: CorrectionConfig(level=level, cap=1.2) for level in ("token", "sequence", "prefix")},
    **{
        f"{level}-normalized": CorrectionConfig(level=level, normalize=True)
        for level in ("token", "sequence", "prefix")
    },
    **{f"reject-{over}": rejecting(over, **highs) for over, highs in HIGHS.items()},
    "veto": CorrectionConfig(veto=0.85),
    "all": CorrectionConfig(
        level="sequence",
        cap=1.5,
        reject=(
            RejectConfig(stat="k1", over="token", low=-0.15),
            RejectConfig(stat="k3", over="sequence_mean", high=0.006),
        ),
        veto=0.8,
    ),
}


def multi_turn(seed: int) -> list[Trajectory]:
    """A few trajectories of prompt, then turns and observations; the trainer differs from the sampler by noise."""
    rng = random.Random(seed)
    batch = []
    for _ in range(rng.randint(1, 5)):
        model = [0] * rng.randint(1, 4)
        for _ in range(rng.randint(1, 3)):
            model += [1] * rng.randint(1, 8) + [0] * rng.randint(0, 4)
        sampler = [-3 * rng.random() for _ in model]
        trainer = [x + rng.gauss(0, 0.1) for x in sampler]
        batch.append(Trajectory(trainer, sampler, model))
    return batch


def packed(batch: list[Trajectory], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Arguments of `correct`, with values that must not enter where nothing was sampled."""
    columns = [[x for t in batch for x in getattr(t, name)] for name in ("trainer", "sampler")]
    trainer, sampler = torch.tensor(columns, dtype=dtype)
    model = torch.tensor([x for t in batch for x in t.model])
    trainer = torch.where(model == 1, trainer, torch.nan)
    ends = torch.tensor([0] + [len(t.model) for t in batch]).cumsum(0).int()
    return trainer, sampler, model, model, ends


def by_sequence(values: torch.Tensor, batch: list[Trajectory]) -> list[list[float]]:
    parts = values.split([len(t.model) for t in batch])
    return [[x for x, m in zip(part.tolist(), t.model, strict=True) if m] for part, t in zip(parts, batch, strict=True)]


def check(name: str, seed: int, dtype: torch.dtype, tolerance: float) -> Expected:
    config, batch = CONFIGS[name], multi_turn(seed)
    expected = reference(batch, config)
    found = correct(config, *packed(batch, dtype))
    rows = MismatchRows(found.table, found.names)
    if config.level == "none":
        assert found.weights is None
    else:
        weights = found.weights / weight_mean(rows, config) if config.normalize else found.weights
        for ours, theirs in zip(by_sequence(weights, batch), expected.weights, strict=True):
            assert ours == pytest.approx(theirs, rel=tolerance)
    assert by_sequence(found.loss_mask, batch) == expected.kept
    assert rows["left"].tolist() == [sum(kept) for kept in expected.kept]
    if seed % 4 == 0:
        metrics = {f"rollout_corr/{name}": value for name, value in expected.metrics.items()}
        assert correction_metrics(rows, config) == pytest.approx(metrics, rel=tolerance, abs=1e-7)
    return expected


@pytest.mark.parametrize("batches", [40, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CONFIGS)
def test_multi_turn_batches_equal_python(name: str, batches: int) -> None:
    found = [check(name, seed, torch.float64, 1e-9) for seed in range(batches)]
    if CONFIGS[name].rejects:
        gone = [not kept for out in found for sequence in out.kept for kept in sequence]
        assert 0.05 < sum(gone) / len(gone) < 0.95
    if CONFIGS[name].level != "none" and not CONFIGS[name].normalize:
        assert any(w == CONFIGS[name].cap for out in found for ws in out.weights for w in ws)


@pytest.mark.parametrize("level", ["token", "sequence", "prefix"])
def test_float32_is_within_1e_6(level: str) -> None:
    for seed in range(20):
        batch = multi_turn(seed)
        for each in batch:
            each.trainer, each.sampler = (torch.tensor(x).float().tolist() for x in (each.trainer, each.sampler))
        found = correct(CONFIGS[level], *packed(batch, torch.float32)).weights
        for ours, theirs in zip(by_sequence(found, batch), reference(batch, CONFIGS[level]).weights, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)


def test_a_nan_is_not_rejected_away() -> None:
    trainer = torch.tensor([-1.0, math.nan, -1.0])
    everything = torch.ones(3, dtype=torch.bool)
    found = correct(CONFIGS["all"], trainer, torch.full((3,), -1.0), everything, everything, torch.tensor([0, 3]))
    assert found.loss_mask.all()


def test_a_batch_without_sampled_tokens_reports_nothing() -> None:
    nothing = torch.zeros(3)
    for config in (CONFIGS["all"], CONFIGS["token-normalized"]):
        found = correct(config, nothing, nothing, nothing, nothing, torch.tensor([0, 3]))
        rows = MismatchRows(found.table, found.names)
        assert correction_metrics(rows, config) == noise_metrics(rows, PolicyObjective()) == {}
        assert weight_mean(rows, config) == 1.0


@functools.cache
def injected(sigma: float, tokens: int = 200_000, length: int = 500) -> MismatchRows:
    """Noise as of a sampler that draws from what it reports: mean -sigma^2 / 2."""
    g = torch.Generator().manual_seed(0)
    d = sigma * torch.randn(tokens, generator=g, dtype=torch.float64) - sigma**2 / 2
    sampled = torch.ones(tokens)
    found = correct(CorrectionConfig(), d, torch.zeros_like(d), sampled, sampled, torch.arange(0, tokens + 1, length))
    return MismatchRows(found.table, found.names)


@pytest.mark.parametrize("sigma", [0.014, 0.03])
def test_injected_noise_crosses_where_the_drift_meets_the_bound(sigma: float) -> None:
    found = noise_metrics(injected(sigma), PolicyObjective.preset("ctpo"))
    assert found["mismatch/sigma"] == pytest.approx(sigma, rel=0.01)
    assert found["mismatch/bias"] == pytest.approx(-(sigma**2) / 2, abs=4 * sigma / 200_000**0.5)
    assert found["mismatch/band_share"] == pytest.approx(sigma / 0.025, rel=0.01)
    assert found["mismatch/t_star"] == pytest.approx((2 * 0.025 / sigma**2) ** 2, rel=0.05)


@pytest.mark.parametrize(
    ("preset", "crossing", "share"),
    [
        ("ctpo-geomean", (2 * 0.025 / 0.03**2) ** 2, 0.03 / 0.025),
        ("ctpo-uniform", 2 * 0.025 / 0.03**2, 0.03 * 500**0.5 / 0.025),
        ("ctpo-fixed", 2 * math.log(2) / 0.03**2, 0.03 * 500**0.5 / math.log(2)),
        ("sequence", -2 * math.log(0.8) / 0.03**2, -0.03 * 500**0.5 / math.log(0.8)),
        ("grpo", None, -0.03 / math.log(0.8)),
        ("gspo", None, -0.03 / 500**0.5 / math.log(1 - 3e-4)),
        ("cispo", None, None),
        ("ctpo-drift", None, 0.03 / 0.025),  # the window moves on by more than this noise
        ("dppo-tv", None, None),
    ],
)
def test_windows_of_other_presets(preset: str, crossing: float | None, share: float | None) -> None:
    """A token's or a mean ratio does not drift on; without a lower bound there is nothing to cross."""
    found = noise_metrics(injected(0.03), PolicyObjective.preset(preset))
    for name, value in (("mismatch/t_star", crossing), ("mismatch/band_share", share)):
        assert found.get(name) == (None if value is None else pytest.approx(value, rel=0.05))


def test_no_noise_crosses_nothing() -> None:
    objective = PolicyObjective.preset("ctpo")
    assert noise_metrics(injected(0.0, 1000), objective) == {"mismatch/sigma": 0.0, "mismatch/bias": 0.0}
    assert math.isfinite(noise_metrics(injected(1e-150, 1000), objective)["mismatch/t_star"])
