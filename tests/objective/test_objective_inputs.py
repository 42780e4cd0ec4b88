"""Advantages, correction weights and the supervised loss."""

from __future__ import annotations

import math
import statistics
import warnings

import pytest
import torch

from ctpo_megatron.config import AdvantageConfig, CorrectionConfig
from ctpo_megatron.objective import (
    Denominators,
    batch_advantages,
    correct,
    group_advantages,
    summarize,
    supervised_loss,
)

REWARDS = [1.0, 0.0, 0.0, 1.0, 1.0, 0.5]


def test_group_divides_by_unbiased_std():
    mean, std = statistics.fmean(REWARDS), statistics.stdev(REWARDS)
    got = group_advantages(REWARDS, AdvantageConfig())
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx([(r - mean) / (std + 1e-6) for r in REWARDS], rel=1e-6)


def test_switches():
    mean = statistics.fmean(REWARDS)
    centred = pytest.approx([r - mean for r in REWARDS], rel=1e-6)
    assert group_advantages(REWARDS, AdvantageConfig(normalize_std=False)).tolist() == centred
    assert group_advantages(REWARDS, AdvantageConfig(kind="mean_baseline")).tolist() == centred
    others = [(sum(REWARDS) - r) / (len(REWARDS) - 1) for r in REWARDS]
    rloo = group_advantages(torch.tensor(REWARDS), AdvantageConfig(kind="rloo"))
    assert rloo.tolist() == pytest.approx([r - o for r, o in zip(REWARDS, others, strict=True)], rel=1e-6)


@pytest.mark.parametrize("kind", ["group", "rloo", "mean_baseline"])
def test_equal_rewards_are_exactly_zero(kind):
    assert not group_advantages([0.1] * 7, AdvantageConfig(kind=kind)).any()


@pytest.mark.parametrize("kind", ["group", "rloo", "mean_baseline"])
def test_group_of_one_is_zero(kind):
    assert group_advantages([3], AdvantageConfig(kind=kind)).tolist() == [0.0]


def test_mean_baseline_is_the_mean_of_the_batch_and_works_with_one_sample_per_prompt():
    mean_baseline = AdvantageConfig(kind="mean_baseline")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert batch_advantages([[1.0], [0.0], [0.0], [0.0]], mean_baseline) == [0.75, -0.25, -0.25, -0.25]
    assert batch_advantages([[1.0, 1.0], [0.0, 0.0]], mean_baseline) == [0.5, 0.5, -0.5, -0.5]
    assert batch_advantages([], mean_baseline) == []  # on ranks that hold no groups


def test_other_kinds_compare_the_samples_of_one_prompt():
    groups = [[1.0, 0.0], [0.0, 0.0, 0.5]]
    for config in (AdvantageConfig(), AdvantageConfig(normalize_std=False), AdvantageConfig(kind="rloo")):
        expected = [a for rewards in groups for a in group_advantages(rewards, config).tolist()]
        assert batch_advantages(groups, config) == expected


@pytest.mark.parametrize("settings", [{}, {"normalize_std": False}, {"kind": "rloo"}])
def test_a_sample_without_a_verdict_is_compared_with_nothing(settings):
    config = AdvantageConfig(**settings)
    whole = [[1.0, None, 0.0, 3.0], [None, None, 2.0], [None, None], [None, 0.5, 0.5], [1.0, 0.0]]
    first, last = (group_advantages(r, config).tolist() for r in ([1.0, 0.0, 3.0], [1.0, 0.0]))
    expected = [first[0], None, *first[1:], *[None] * 5, None, 0.0, 0.0, *last]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a lone verdict is no group of one: no key of the configuration helps
        assert batch_advantages(whole, config) == expected
    assert batch_advantages([[0, 1, 2, None]], AdvantageConfig(normalize_std=False)) == [-1.0, 0.0, 1.0, None]


def test_the_mean_of_the_batch_is_that_of_the_verdicts():
    mean_baseline = AdvantageConfig(kind="mean_baseline")
    assert batch_advantages([[1.0], [None], [0.0], [0.5]], mean_baseline) == [0.5, None, -0.5, 0.0]
    assert batch_advantages([[1.0], [None], [None]], mean_baseline) == [None] * 3
    assert batch_advantages([[None, None]], mean_baseline) == [None] * 2


@pytest.mark.parametrize("low", [1e9, -1e9, 2.0**40, 1e12, 16777216.0, 0.1])
@pytest.mark.parametrize("kind", [list, tuple, lambda r: torch.tensor(r, dtype=torch.float64)])
def test_large_rewards_are_not_rounded_to_each_other(low, kind):
    rewards = [low, low + 1]
    expected = [-math.sqrt(0.5), math.sqrt(0.5)]
    assert group_advantages(kind(rewards), AdvantageConfig()).tolist() == pytest.approx(expected, rel=1e-4)
    assert group_advantages(kind(rewards), AdvantageConfig(normalize_std=False)).tolist() == pytest.approx([-0.5, 0.5])
    assert group_advantages(kind(rewards), AdvantageConfig(kind="rloo")).tolist() == pytest.approx([-1, 1], rel=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_reward_is_named(bad):
    with pytest.raises(ValueError, match=f"reward 2 of the group is {bad}"):
        group_advantages([1.0, 0.0, bad], AdvantageConfig())
    with pytest.raises(ValueError, match="non-empty"):
        group_advantages([], AdvantageConfig())


def test_correction_weights_never_overflow():
    x, zeros, ones = torch.full((500,), 50.0, requires_grad=True), torch.zeros(500), torch.ones(500)
    got = correct(CorrectionConfig(level="sequence"), x, zeros, ones, ones, torch.tensor([0, 500])).weights
    torch.testing.assert_close(got, torch.full((500,), 5.0))
    assert not got.requires_grad


def test_supervised_loss_is_the_token_mean_whatever_the_cut():
    g = torch.Generator().manual_seed(0)
    log_probs = -torch.rand(4, 6, generator=g)
    mask = (torch.rand(4, 6, generator=g) < 0.6).int()
    log_probs[mask == 0] = math.nan
    log_probs.requires_grad_()
    whole = supervised_loss(log_probs, mask)
    (gradient,) = torch.autograd.grad(whole.loss, log_probs)
    n = int(mask.sum())
    torch.testing.assert_close(gradient, -mask / n)
    torch.testing.assert_close(whole.loss, -log_probs.detach()[mask == 1].mean())
    step = Denominators.of(mask)
    parts = [supervised_loss(log_probs[i : i + 1], mask[i : i + 1], step) for i in range(4)]
    torch.testing.assert_close(sum(p.loss for p in parts), whole.loss)
    assert summarize(whole.stats) == {"supervised/loss": pytest.approx(whole.loss.item())}
    with pytest.raises(ValueError, match="loss_mask has shape"):
        supervised_loss(log_probs, mask[0])
