"""Statistics: right numbers, and merging parts equals the whole."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from ctpo_megatron.objective import (
    PRESETS,
    Denominators,
    PolicyObjective,
    merge,
    policy_loss,
    summarize,
    supervised_loss,
)
from tests.objective.objective_reference import packed, random_batch, reference


@pytest.mark.parametrize("name", PRESETS)
def test_summary_equals_python(name):
    batch = random_batch(31, [30, 0, 12, 45], 0.3)
    objective = PolicyObjective.preset(name)
    expected = reference(batch, objective)
    metrics = summarize(policy_loss(**packed(batch), objective=objective).stats)
    n, clipped = len(expected.ratio), expected.high + expected.low + expected.dual
    d = [b - a for s in batch for a, b, m in zip(s.log_probs, s.anchor, s.model, strict=True) if m]
    want = {
        "actor/pg_loss": expected.loss,
        "actor/pg_clipfrac": (expected.high + expected.low) / n,
        "actor/pg_clipfrac_lower": expected.dual / n,
        "actor/pg_clipfrac_computed": (expected.high + expected.low) / n,
        "actor/pg_clipfrac_lower_computed": expected.dual / n,
        "actor/ppo_kl": statistics.fmean(d),
        "pg_update/loss_tokens": n,
        "pg_update/computed_tokens": n,
        "pg_update/is_ratio/mean": statistics.fmean(expected.ratio),
        "pg_update/is_ratio/min": min(expected.ratio),
        "pg_update/is_ratio/max": max(expected.ratio),
        "pg_update/is_ratio/std": statistics.stdev(expected.ratio),
        "pg_update/log_ratio_capped/count": 0,
    }
    for side, count in (("high", expected.high), ("low", expected.low), ("dual", expected.dual), ("total", clipped)):
        want[f"pg_update/clip/{side}/count"] = count
        want[f"pg_update/clip/{side}/rate"] = want[f"pg_update/clip/{side}/rate_computed"] = count / n
    assert metrics.pop("pg_update/log_ratio_abs_max") > 0
    assert metrics == {key: pytest.approx(value, rel=1e-9, abs=1e-12) for key, value in want.items()}


def test_merged_parts_equal_the_whole():
    batch = random_batch(32, [20, 3, 0, 17, 8], 0.4)
    objective = PolicyObjective.preset("ctpo")
    step = Denominators.of_counts(sum(map(bool, s.loss)) for s in batch)
    whole = policy_loss(**packed(batch), objective=objective).stats
    parts = [policy_loss(**packed([s]), objective=objective, denominators=step).stats for s in batch]
    gathered = [part.cpu() for part in parts]
    for pieces in (parts, parts[::-1], gathered, [merge(parts[:2]), merge(parts[2:])]):
        both = merge(pieces)
        assert torch.equal(both.maxima, whole.maxima)
        assert torch.equal(both.sums[1:3], whole.sums[1:3]) and torch.equal(both.sums[6:], whole.sums[6:])
        assert summarize(both) == pytest.approx(summarize(whole), rel=1e-12)


def test_first_mini_batch_shows_ratio_one():
    x = torch.randn(2, 5)
    metrics = summarize(policy_loss(x, x, torch.ones(2), torch.ones(2, 5), PolicyObjective()).stats)
    assert metrics["pg_update/log_ratio_abs_max"] == 0 == metrics["pg_update/is_ratio/std"]
    assert metrics["pg_update/is_ratio/mean"] == metrics["pg_update/is_ratio/max"] == 1
    assert metrics["pg_update/clip/total/count"] == 0


def test_capped_tokens_are_counted_and_seen():
    log_probs = torch.tensor([[8.0, 4.0, 0.0]])
    out = policy_loss(log_probs, torch.zeros(1, 3), torch.zeros(1), torch.ones(1, 3), PolicyObjective())
    metrics = summarize(out.stats)
    assert metrics["pg_update/log_ratio_capped/count"] == 2
    assert metrics["pg_update/log_ratio_abs_max"] == 12
    assert metrics["pg_update/is_ratio/max"] == pytest.approx(torch.tensor(10.0).exp().item())


def test_largest_log_ratio_is_over_all_model_tokens():
    """It is there to find faults, and a rejected token may be where the fault shows."""
    log_probs, model, loss = torch.tensor([[0.5, 7.0, 3.0], [1, 0, 1], [1, 0, 0]])[:, None]
    stats = policy_loss(log_probs, 0 * model, torch.ones(1), model, PolicyObjective(), loss_mask=loss).stats
    assert summarize(stats)["pg_update/log_ratio_abs_max"] == 3.5
    assert summarize(stats)["pg_update/is_ratio/max"] == pytest.approx(math.exp(0.5))


def test_nothing_trained_reports_no_means():
    x = torch.zeros(1, 3)
    out = policy_loss(x, x, torch.ones(1), torch.ones(1, 3), PolicyObjective(), loss_mask=torch.zeros(1, 3))
    metrics = summarize(out.stats)
    assert metrics["actor/pg_loss"] == 0 and metrics["actor/ppo_kl"] == 0
    assert "pg_update/is_ratio/mean" not in metrics and "pg_update/clip/high/rate" not in metrics


def test_unlike_or_no_statistics_do_not_merge():
    x = torch.zeros(1, 3)
    policy = policy_loss(x, x, torch.ones(1), torch.ones(1, 3), PolicyObjective()).stats
    supervised = supervised_loss(x, torch.ones(1, 3)).stats
    for bad in ([], [policy, supervised]):
        with pytest.raises(ValueError, match="exactly one kind"):
            merge(bad)


def test_nan_is_not_hidden():
    x = torch.tensor([[float("nan"), 0.0]])
    metrics = summarize(policy_loss(x, torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2), PolicyObjective()).stats)
    for name in ("actor/pg_loss", "actor/ppo_kl", "pg_update/is_ratio/mean", "pg_update/is_ratio/max",
                 "pg_update/is_ratio/std", "pg_update/log_ratio_abs_max"):  # fmt: skip
        assert metrics[name] != metrics[name], name
