"""Every row of the gradient table, the stop-gradient form, ties, limits and NaN."""

from __future__ import annotations

import math

import pytest
import torch

from ctpo_megatron.objective import PRESETS, PolicyObjective, policy_loss
from tests.objective.objective_reference import packed, random_batch
from tests.objective.test_objective_loss import run

T = 9  # position of the token under test: s_t = 3
INSIDE, HIGH, BETWEEN, LOW = 0.1, 0.2, -0.05, -0.1  # log r; bounds at t = 9: low -.075, high .15, dual .15

SUM = {"loss_agg_mode": "seq-mean-token-sum"}
"""Of one sequence the sum over its tokens."""


def token_gradient(log_r: float, a: float, *, l: int = 1, spread: bool = True, **overrides) -> tuple[float, float]:  # noqa: E741
    """d l_t / d log p_t and l_t of token 9 of a sequence with S_9 = `log_r`; asserts that no other token is reached."""
    d = torch.zeros(1, T, dtype=torch.float64)
    d[0, :] = log_r / T if spread else 0.0
    d[0, -1] = log_r - d[0, :-1].sum()
    log_probs = (d - 1).requires_grad_()
    loss_mask = torch.zeros(1, T)
    loss_mask[0, -1] = l
    objective = PolicyObjective.preset("ctpo", **SUM, **overrides)
    out = policy_loss(
        log_probs,
        torch.full_like(log_probs, -1),
        torch.tensor([a], dtype=torch.float64),
        torch.ones(1, T),
        objective,
        loss_mask=loss_mask,
    )
    out.loss.backward()
    assert not log_probs.grad[0, :-1].any()
    return log_probs.grad[0, -1].item(), out.per_token[0, -1].item()


@pytest.mark.parametrize(
    ("a", "log_ratios", "bound"),
    [
        (0.7, (INSIDE, BETWEEN, LOW, -3.0, 0.0), None),  # there is no lower clip for A > 0
        (2.0, (INSIDE, BETWEEN, LOW, -3.0, 0.0), None),
        (0.7, (HIGH, 3.0), 0.15),
        (-0.7, (BETWEEN, 0.0, INSIDE), None),
        (-0.7, (LOW, -3.0), -0.075),
        (-0.7, (HIGH, 3.0), 0.15),
    ],
)
def test_a_token_has_its_gradient_inside_and_the_loss_of_the_bound_beyond(a, log_ratios, bound):
    for log_r in log_ratios:
        gradient, loss = token_gradient(log_r, a)
        assert loss == pytest.approx(-a * math.exp(log_r if bound is None else bound))
        assert gradient == (pytest.approx(-a * math.exp(log_r), abs=1e-10) if bound is None else 0)


def test_dual_bound_apart_from_high():
    """high bounds nothing for A < 0; dual does, and only when it is set."""
    assert token_gradient(0.4, -1.0, clip_c=0.2)[0] == pytest.approx(math.exp(0.4))
    assert token_gradient(0.7, -1.0, clip_c=0.2) == (0.0, pytest.approx(math.exp(0.6)))
    assert token_gradient(0.7, -1.0, clip_c=-1)[0] == pytest.approx(math.exp(0.7))
    assert token_gradient(0.4, 1.0, clip_high=0.2, clip_c=0.01)[0] == pytest.approx(-math.exp(0.4))


@pytest.mark.parametrize("a", [1.0, -1.0])
def test_cap_at_ten(a):
    open_bounds = {"clip_low": 100.0, "clip_high": 100.0, "clip_c": None}
    assert token_gradient(9.9, a, **open_bounds)[0] == pytest.approx(-a * math.exp(9.9))
    assert token_gradient(10.1, a, **open_bounds) == (0.0, pytest.approx(-a * math.exp(10)))


@pytest.mark.parametrize("difference", [-25.0, 25.0])
def test_limit_of_twenty_changes_the_value_and_not_the_own_gradient(difference):
    """The second token brings the sum back, so that its ratio is inside while a limited d stands before it."""
    log_probs = torch.tensor([[difference, -math.copysign(20.0, difference)]], dtype=torch.float64, requires_grad=True)
    objective = PolicyObjective.preset("ctpo", **SUM)
    policy_loss(log_probs, torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2), objective).loss.backward()
    assert log_probs.grad[0, 1].item() == pytest.approx(-1.0)
    assert log_probs.grad[0, 0].item() == pytest.approx(0.0 if difference > 0 else -math.exp(-20.0), rel=1e-9)


@pytest.mark.parametrize("power", [0.0, 0.5, -0.5])
def test_equality_with_a_bound_is_inside(power):
    """A bound of 0 at r = 1 is the tie that really happens (first mini-batch): the gradient is whole, not half."""
    for a in (1.0, -1.0):
        zero = {"clip_low": 0.0, "clip_high": 0.0, "clip_c": 0.0, "clip_power": power}
        assert token_gradient(0.0, a, spread=False, **zero)[0] == -a
    # .125 s_t with power 0 is exact in binary.
    assert token_gradient(0.125, 1.0, spread=False, clip_high=0.125, clip_power=0.0)[0] == -math.exp(0.125)
    assert token_gradient(0.125, -1.0, spread=False, clip_c=0.125, clip_power=0.0)[0] == math.exp(0.125)


@pytest.mark.parametrize(
    ("log_r", "a", "slope"), [(-0.5, 1, 1), (-0.29, 1, 0), (-0.55, -1, 0), (-0.5, -1, 1), (-0.29, -1, 0)]
)
def test_the_window_follows_the_drift(log_r, a, slope):
    """s2 = .1 puts the centre at t = 9 on -.45: the window is [-.525, -.3], as the dual bound."""
    assert token_gradient(log_r, a, clip_drift=0.1)[0] == pytest.approx(-a * slope * math.exp(log_r))


@pytest.mark.parametrize("name", PRESETS)
def test_the_loss_of_a_token_reaches_its_own_log_prob_alone(name):
    """d l_t / d log_probs_k is exactly 0 for k != t, whole-sequence ratios included."""
    arguments = packed(random_batch(4, [5, 7], 0.05))
    objective = PolicyObjective.preset(name)
    rows = []
    for t in range(12):
        only = torch.zeros(12)
        only[t] = arguments["loss_mask"][t]
        _, gradient = run({**arguments, "loss_mask": only}, objective)
        rows.append(gradient)
    jacobian = torch.stack(rows)
    diagonal = jacobian.diagonal()
    assert diagonal.any() and torch.equal(jacobian, torch.diag(diagonal))


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_masked_values_never_enter(name, bad):
    clean = packed(random_batch(9, [6, 9, 4], 0.1))
    objective = PolicyObjective.preset(name)
    dirty = {k: v.clone() for k, v in clean.items()}
    off = dirty["response_mask"] == 0
    assert off.any()
    for key in ("log_probs", "old_log_probs"):
        dirty[key][off] = bad
    for key in ("advantages", "weights"):
        dirty[key][dirty["loss_mask"] == 0] = bad
    (one, gradient), (other, same) = (run(arguments, objective) for arguments in (clean, dirty))
    assert torch.equal(one.loss, other.loss) and torch.equal(gradient, same)
    assert torch.equal(one.stats.as_tensor(), other.stats.as_tensor())


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("where", ["log_probs", "old_log_probs"])
def test_nan_surfaces_in_its_own_sequence_from_its_position_on(name, trained, where):
    """Loss and gradient alike: the bounds must not turn a NaN into a silent zero gradient."""
    arguments = packed(random_batch(9, [6, 8, 4], 0.0))
    arguments["response_mask"], arguments["loss_mask"] = torch.ones(18), torch.ones(18)
    arguments["loss_mask"][9] = float(trained)
    arguments[where][9] = math.nan
    objective = PolicyObjective.preset(name, **SUM)
    out, gradient = run(arguments, objective)
    spoiled = {"token": range(9, 10), "sequence": range(6, 14), "sequence-geomean": range(6, 14)}
    expected = torch.zeros(18, dtype=torch.bool)
    expected[list(spoiled.get(objective.ratio_mode, range(9, 14)))] = True
    expected[9] &= trained
    assert torch.equal(out.per_token.isnan(), expected)
    assert torch.equal(gradient.isnan(), expected)
