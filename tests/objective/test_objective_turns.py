"""Credit by turn: advantages of turns, and ratios at their ends, against plain Python; one turn is the outcome."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ctpo_kernels import SUMS
from ctpo_kernels.names import LOSS_AGG_MODES
from ctpo_megatron.config import AdvantageConfig, ConfigError
from ctpo_megatron.objective import (
    Denominators,
    PolicyObjective,
    batch_advantages,
    merge,
    policy_loss,
    position_stats,
    summarize,
    token_diagnostics,
    turn_advantages,
)
from tests.objective import turn_reference
from tests.objective.test_objective_loss import BATCHES, few, run
from tests.objective.turn_reference import packed_turns, random_turns, turn_end_reference

SERVED = ("ctpo", "ctpo-paper", "ctpo-uniform", "ctpo-fixed", "ctpo-drift")
REWARDS = st.integers(-2, 2).map(float)
GROUPS = st.lists(st.lists(REWARDS, min_size=1, max_size=4), min_size=2, max_size=5)
KINDS = [("group", True), ("group", False), ("rloo", None)]


def at_ends(name: str = "ctpo", **options: object) -> PolicyObjective:
    return PolicyObjective.preset(name, turn_ratio="turn-end", **options)


def flat(rows: list[list[float]]) -> torch.Tensor:
    return torch.tensor([x for row in rows for x in row], dtype=torch.float64)


@pytest.mark.parametrize("name", SERVED)
@given(**BATCHES, aggregation=st.sampled_from(LOSS_AGG_MODES), counted=st.booleans())
@few
def test_ratios_at_the_ends_of_turns_equal_python(name, lengths, seed, spread, aggregation, counted):
    objective = at_ends(name, loss_agg_mode=aggregation, count_masked_sequences=counted, loss_scale_factor=7.0)
    batch = random_turns(seed, lengths, spread)
    expected = turn_end_reference(batch, objective)
    out, gradient = run(packed_turns(batch), objective)
    close = {"rtol": 1e-9, "atol": 1e-9}
    torch.testing.assert_close(out.per_token.detach(), flat(expected.per_token), **close)
    torch.testing.assert_close(out.loss.item(), expected.loss, **close)
    torch.testing.assert_close(gradient, flat(expected.gradient), **close)
    counts = [SUMS.index(f"clip_{side}") for side in ("high", "low", "dual")]
    assert out.stats.sums[counts].tolist() == [expected.high, expected.low, expected.dual]


def test_every_bound_of_an_end_is_met():
    batch = random_turns(0, [40, 25, 60, 33], 0.05)
    expected, (_, gradient) = turn_end_reference(batch, at_ends()), run(packed_turns(batch), at_ends())
    assert min(expected.high, expected.low, expected.dual) > 0
    torch.testing.assert_close(gradient, flat(expected.gradient), rtol=1e-9, atol=1e-9)


def test_neither_order_nor_company_changes_a_bit():
    batch = random_turns(5, [9, 30, 4, 17, 1], 0.1)
    whole = run(packed_turns(batch, torch.float32), at_ends(), denominators=Denominators(5, 5, 40))
    for order in ([2, 0, 4, 3, 1], [3], [1, 4]):
        out, gradient = run(
            packed_turns([batch[i] for i in order], torch.float32), at_ends(), denominators=Denominators(5, 5, 40)
        )
        ends = [0, *itertools.accumulate(len(each.turn) for each in batch)]
        chosen = torch.cat([torch.arange(ends[i], ends[i + 1]) for i in order])
        assert torch.equal(out.per_token, whole[0].per_token[chosen]) and torch.equal(gradient, whole[1][chosen])


def test_a_nan_stays_in_its_sequence_and_shows_in_the_gradient():
    batch = random_turns(1, [12, 12, 12], 0.1)
    where = batch[1].sequence.model.index(1)
    batch[1].sequence.loss[where] = 1
    batch[1].sequence.log_probs[where] = float("nan")
    _, gradient = run(packed_turns(batch), at_ends())
    assert gradient[12 + where].isnan() and not gradient[:12].isnan().any() and not gradient[24:].isnan().any()


def test_the_end_of_a_turn_counts_also_when_it_is_out_of_the_loss():
    """Rejecting the last token of the only turn leaves the gradient of the others."""
    (each,) = random_turns(2, [10], 0.02)
    each.sequence.model = each.sequence.loss = [1] * 10
    each.turn, each.sequence.advantage = [1] * 10, [1.0] * 10
    options = {"denominators": Denominators(1, 1, 10)}
    objective = at_ends(loss_agg_mode="token-mean")
    _, before = run(packed_turns([each]), objective, **options)
    each.sequence.loss = [1] * 9 + [0]
    _, after = run(packed_turns([each]), objective, **options)
    assert before.all() and torch.equal(before[:9], after[:9]) and after[9] == 0


def test_micro_batches_add_up_and_statistics_merge():
    batch = random_turns(6, [14, 9, 21, 3], 0.05)
    step = Denominators.of(*(packed_turns(batch)[name] for name in ("loss_mask", "cu_seqlens")))
    whole, gradient = run(packed_turns(batch), at_ends(), denominators=step)
    parts = [run(packed_turns(part), at_ends(), denominators=step) for part in (batch[:1], batch[1:])]
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), gradient, rtol=0, atol=0)
    assert summarize(merge([out.stats for out, _ in parts])) == pytest.approx(summarize(whole.stats))


def test_what_the_objective_needs_is_said():
    with pytest.raises(ConfigError, match=r"turn_ratio.*and ratio_mode is token; set ratio_mode to cumprod"):
        PolicyObjective.preset("grpo", turn_ratio="turn-end")
    with pytest.raises(ConfigError) as refused:
        PolicyObjective.preset("gmpo", turn_ratio="turn-end")
    assert len(refused.value.problems) == 2
    arguments = packed_turns(random_turns(0, [5], 0.1))
    del arguments["turn"]
    with pytest.raises(ValueError, match="turn-end needs the turn of every token"):
        policy_loss(**arguments, objective=at_ends())


def test_reports_draw_the_ratio_and_the_bounds_of_the_end():
    one = torch.ones(6)
    turn = torch.tensor([1, 1, 1, 2, 2, 2])
    d = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    found = token_diagnostics(d - 1, -one, one, at_ends(), cu_seqlens=torch.tensor([0, 6]), turn=turn)
    torch.testing.assert_close(found.log_ratio, torch.tensor([0.6] * 3 + [2.1] * 3))
    torch.testing.assert_close(found.high, 0.05 * torch.tensor([3.0] * 3 + [6.0] * 3).sqrt())
    torch.testing.assert_close(found.prefix, d.cumsum(0))


@pytest.mark.parametrize(("kind", "normalize"), KINDS)
@given(returns=GROUPS)
@few
def test_advantages_of_turns_equal_python(kind, normalize, returns):
    found = turn_advantages([returns], AdvantageConfig(kind=kind, normalize_std=normalize))
    expected = turn_reference.turn_advantages(returns, kind, normalize is not False)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize(("kind", "normalize"), [*KINDS, ("mean_baseline", None)])
@given(
    rewards=st.lists(st.lists(st.none() | st.floats(-3, 3), min_size=2, max_size=5), min_size=1, max_size=3),
    turns=st.integers(1, 4),
)
@few
def test_a_reward_of_the_last_of_equally_many_turns_has_the_bits_of_an_outcome(kind, normalize, rewards, turns):
    config, count = AdvantageConfig(kind=kind, normalize_std=normalize), 1 if kind == "mean_baseline" else turns
    by_turn = [[None if reward is None else [reward] * count for reward in group] for group in rewards]
    expected = [None if each is None else (each,) * count for each in batch_advantages(rewards, config)]
    assert turn_advantages(by_turn, config) == expected


def test_what_has_no_verdict_is_compared_with_nothing():
    found = turn_advantages([[[1.0, 1.0], None, [0.0]], [None, [2.0]]], AdvantageConfig(kind="rloo"))
    assert found == [(1.0, 1.0), None, (-1.0,), None, None]


def test_statistics_by_position_have_the_sign_of_a_turns_own_gain():
    """The bound is chosen by it: the first turn loses by itself, although its return to go is above the baseline."""
    one = torch.ones(4)
    turn, advantages = torch.tensor([1, 1, 2, 2]), torch.tensor([0.5, 0.5, 1.5, 1.5])
    d = torch.tensor([-0.4, -0.4, 0.4, 0.4])
    bounds = torch.tensor([0, 4])
    found = position_stats(d - 1, -one, advantages, one, one, at_ends(), bounds, turn=turn)
    gained, lost = found.column("n_loss")[0], found.column("n_loss")[1]
    assert (gained.sum(), lost.sum()) == (2, 2)
    assert found.column("clip_low")[1].sum() == 2 and found.column("clip_low")[0].sum() == 0
