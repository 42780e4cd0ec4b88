"""Values that are no numbers: never from a masked slot, always from a valid one, in its own sequence from there on."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels.packings import assert_reference, random_batch, run, same_bits
from tests.kernels.reference import ctpo_loss_reference
from tests.support.pairwise import pairwise

# The interpreter computes with numpy, which warns of what is tested here.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

BAD = [math.nan, math.inf, -math.inf]
LENGTHS = [20, 24, 16, 12]
POSITION = 30  # in the second sequence, every token of which is a response
RATIOS = ["cumprod", "geomean", "token", "sequence", "sequence-geomean"]


@pytest.mark.parametrize("bad", BAD)
def test_masked_slots_never_enter(backend: str, bad: float) -> None:
    batch = random_batch(1, LENGTHS, padding=3)
    masked = ~batch["response_mask"]
    clean, dirty = dict(batch), dict(batch)
    for name in ("log_probs", "old_log_probs", "advantages", "weights"):
        clean[name] = torch.where(masked, 0.0, batch[name])
        dirty[name] = torch.where(masked, bad, batch[name])
    found = run(dirty)
    assert same_bits(found, run(clean))
    assert found.gradient.isfinite().all()
    assert found.stats.sums.isfinite().all()


@pytest.mark.parametrize("bad", BAD)
def test_advantages_and_weights_outside_the_loss_never_enter(backend: str, bad: float) -> None:
    batch = random_batch(2, LENGTHS)
    outside = batch["response_mask"] & ~batch["loss_mask"]
    assert outside.any()
    dirty = {**batch, **{name: torch.where(outside, bad, batch[name]) for name in ("advantages", "weights")}}
    assert same_bits(run(dirty), run(batch))


@pytest.mark.parametrize("ratio", RATIOS)
def test_nan_log_prob_shows_in_its_own_sequence(backend: str, ratio: str) -> None:
    batch = random_batch(3, LENGTHS)
    batch["loss_mask"] = batch["response_mask"].clone()
    clean = run(batch, ratio_mode=ratio)
    batch["log_probs"][POSITION] = math.nan
    found = run(batch, ratio_mode=ratio)
    assert_reference(found, ctpo_loss_reference(**batch, ratio_mode=ratio))
    reached = {"cumprod": range(POSITION, 44), "geomean": range(POSITION, 44), "token": [POSITION]}
    expected = torch.zeros(72, dtype=torch.bool)
    expected[list(reached.get(ratio, range(20, 44)))] = True
    assert torch.equal(found.gradient.isnan(), expected)
    assert torch.equal(found.gradient[~expected], clean.gradient[~expected])
    assert found.loss.isnan()
    assert found.stats.maxima.isnan().all()


@pytest.mark.parametrize("name", ["advantages", "weights"])
def test_nan_factor_shows_at_its_token(backend: str, name: str) -> None:
    batch = random_batch(4, LENGTHS)
    position = int(batch["loss_mask"].nonzero()[9])
    clean = run(batch)
    while clean.per_token.clip[position] != 0:
        position += 1
    batch[name][position] = math.nan
    found = run(batch)
    assert found.loss.isnan()
    assert found.gradient.isnan().nonzero().tolist() == [[position]]


@pairwise(
    {"backend": ["torch", "triton"], "new": BAD, "old": [-1.0, math.inf, -math.inf, math.nan]}, indirect=["backend"]
)
def test_infinite_differences_are_cut_and_undefined_ones_stay(backend: str, new: float, old: float) -> None:
    batch = random_batch(5, LENGTHS)
    batch["log_probs"][POSITION], batch["old_log_probs"][POSITION] = new, old
    found = run(batch)
    assert_reference(found, ctpo_loss_reference(**batch))
    d = new - old
    before = int(found.per_token.prefix[POSITION - 1])
    if math.isnan(d):
        assert found.per_token.log_ratio[POSITION:44].isnan().all()
    else:
        assert int(found.per_token.prefix[POSITION]) - before == math.copysign(20, d) * 2**40


@pytest.mark.parametrize("bad", BAD)
def test_on_policy_log_prob_that_is_not_finite(backend: str, bad: float) -> None:
    batch = random_batch(6, LENGTHS) | {"old_log_probs": None}
    batch["log_probs"][POSITION] = bad
    found = run(batch)
    assert_reference(found, ctpo_loss_reference(**batch))
    assert found.per_token.log_ratio[POSITION].isnan()


def test_nothing_in_the_loss_gives_zero(backend: str) -> None:
    batch = random_batch(7, LENGTHS)
    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    found = run(batch)
    assert float(found.loss) == 0
    assert not found.gradient.any()
    assert found.stats.maxima.tolist()[:2] == [-math.inf, -math.inf]
    batch["response_mask"] = torch.zeros_like(batch["response_mask"])
    assert run(batch).stats.maxima.tolist() == [-math.inf] * 3
