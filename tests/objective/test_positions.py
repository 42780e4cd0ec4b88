"""Statistics by position equal a loop over the tokens, and add up whatever the packing."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch

from ctpo_megatron.base.positions import (
    AGE_COLUMNS,
    AGES,
    BINS,
    COLUMNS,
    COUNTS,
    HISTOGRAM_BINS,
    LAST_POSITIONS,
    SAMPLER_COLUMNS,
    SIGNS,
    SUMS,
    bin_of,
    quantile,
)
from ctpo_megatron.objective import (
    PRESETS,
    PolicyObjective,
    PositionStats,
    SamplerTokens,
    position_metrics,
    position_stats,
    skipped_stats,
)
from tests.objective.objective_reference import Sequence, log_ratio, packed, random_batch, reference

LENGTHS = [30, 0, 12, 400, 45, 1]


def float32(values: list[float]) -> list[float]:
    return torch.tensor(values).tolist()


def a_batch(seed: int = 7, spread: float = 0.3) -> list[Sequence]:
    """In float32, as passes give them."""
    batch = random_batch(seed, LENGTHS, spread)
    for sequence in batch:
        sequence.log_probs, sequence.anchor = float32(sequence.log_probs), float32(sequence.anchor)
    return batch


def stats(
    batch: list[Sequence],
    objective: PolicyObjective | None,
    entropy: torch.Tensor | None = None,
    sampler: SamplerTokens | None = None,
) -> PositionStats:
    flat = packed(batch, torch.float32)
    del flat["weights"]
    anchor = flat.pop("old_log_probs")
    return position_stats(anchor=anchor, objective=objective, entropy=entropy, sampler=sampler, **flat)


VERSION = 30


def a_sampler(batch: list[Sequence], *, known: bool = True) -> SamplerTokens:
    """Of every token: half of them uncertain, up to 20 versions old. known: what the trainer had before its updates."""
    g, n = torch.Generator().manual_seed(1), sum(map(len, batch))
    log_probs = -2 * math.log(2) * torch.rand(n, generator=g)
    version = VERSION - torch.randint(0, 21, (n,), generator=g, dtype=torch.int32)
    trainer = log_probs + 0.2 * torch.randn(n, generator=g) - 0.05
    return SamplerTokens(log_probs, version, VERSION, trainer if known else None)


def bin_by_definition(t: int) -> int:
    """Bins of science.md: 1 to 16 one by one, then (16 x 2^(j/4), 16 x 2^((j+1)/4)]."""
    if t <= 16:
        return t - 1
    return 16 + next((j for j in range(48) if t <= math.floor(16 * 2 ** ((j + 1) / 4))), 47)


def oracle(batch: list[Sequence], objective: PolicyObjective) -> dict[tuple[str, int, str], float]:
    """(sign, bin, column) -> value, token by token in Python."""
    found: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    for s in batch:
        d = [float32([a - b])[0] if m else 0.0 for a, b, m in zip(s.log_probs, s.anchor, s.model, strict=True)]
        for i in range(len(s)):
            if not s.model[i]:
                continue
            t, prefix, a = sum(s.model[: i + 1]), math.fsum(d[: i + 1]), s.advantage[i]
            sign = "positive" if a > 0 else "negative" if a < 0 else "zero"
            r = math.exp(min(prefix, 10.0))
            x = float32([log_ratio(objective.ratio_mode, d, s.model, i)])[0]
            values = {"n": 1, "n_computed": 1, "t": t, "S": prefix, "S2": prefix**2, "d": d[i], "d2": d[i] ** 2}
            values |= {"r": r, "r2": r * r}
            if objective.ratio_mode != "cumprod":
                values |= {"x": x, "x2": x * x}
            if s.loss[i]:
                values["n_loss"] = 1
                values["fixed_high"] = a > 0 and r > 5
                values["fixed_low"] = a < 0 and r < 0.5
                values["widening_high"] = a > 0 and prefix > 0.05 * math.sqrt(t)
                values["widening_low"] = a < 0 and prefix < -0.025 * math.sqrt(t)
            for name, value in values.items():
                found[sign, bin_by_definition(t), name].append(value)
    return {key: math.fsum(values) for key, values in found.items()}


def test_the_bins() -> None:
    assert BINS == len(LAST_POSITIONS) == 64 and LAST_POSITIONS[-1] == 65_536
    assert sorted(set(LAST_POSITIONS)) == list(LAST_POSITIONS)
    positions = np.arange(1, 100_000)
    assert bin_of(positions).tolist()[:200] == [bin_by_definition(t) for t in range(1, 201)]
    assert [int(bin_of(np.array([t]))[0]) for t in (65_536, 65_537, 10**9)] == [63, 63, 63]


DRAWN: dict[str, dict[str, Any]] = {"cispo": {"spread": 3.0}, "ctpo-weight": {"seed": 9, "spread": 1.0}}
"""Preset -> batch of which its bounds act on some tokens."""


@pytest.mark.parametrize("name", PRESETS)
def test_every_sum_is_that_of_the_tokens(name: str) -> None:
    batch, objective = a_batch(**DRAWN.get(name, {})), PolicyObjective.preset(name)
    found, expected = stats(batch, objective), oracle(batch, objective)
    clipped = {"clip_high", "clip_low", "clip_dual"}
    for sign, cells in zip(SIGNS, found.cells, strict=True):
        for place in range(BINS):
            for column, value in zip(COLUMNS, cells[place], strict=True):
                if column in clipped or column in ("entropy", "n_entropy"):
                    continue
                wanted = expected.get((sign, place, column), 0.0)
                exact = 0 if column in COUNTS or column == "t" else 1e-12
                assert value == pytest.approx(wanted, rel=max(exact, 1e-15), abs=exact), (sign, place, column)
    counts = reference(batch, objective)
    assert [found.column(f"clip_{side}").sum() for side in ("high", "low", "dual")] == [
        counts.high,
        counts.low,
        counts.dual,
    ]
    assert (counts.high + counts.low + counts.dual > 0) == (name != "sapo"), "a gate cuts nothing"
    assert found.histogram.sum() == found.column("n_loss").sum() == len(counts.ratio)


@pytest.mark.parametrize("name", ["ctpo", "gspo"])
def test_parts_add_up_to_the_whole_in_any_order(name: str) -> None:
    batch, objective = a_batch(), PolicyObjective.preset(name)
    whole = stats(batch, objective)
    for order in (range(len(batch)), reversed(range(len(batch)))):
        parts = sum((stats([batch[i]], objective) for i in order), PositionStats.empty())
        for column in COLUMNS:
            if column in COUNTS:
                assert np.array_equal(parts.column(column), whole.column(column))
            else:
                np.testing.assert_allclose(parts.column(column), whole.column(column), rtol=1e-12, atol=1e-12)
        assert np.array_equal(parts.histogram, whole.histogram)
        np.testing.assert_allclose(parts.shares, whole.shares, rtol=1e-12)


def test_the_clipped_share_of_each_trajectory_counts_once() -> None:
    batch, objective = a_batch(), PolicyObjective.preset("ctpo")
    found = stats(batch, objective)
    each = [reference([s], objective) for s in batch if sum(s.loss)]
    tokens = [sum(s.loss) for s in batch if sum(s.loss)]
    wanted = [sum(getattr(o, side) / n for o, n in zip(each, tokens, strict=True)) for side in ("high", "low", "dual")]
    assert found.shares.tolist() == pytest.approx([*wanted, len(each)])
    metrics = position_metrics(found, found)
    assert metrics["pg_update/clip/total/rate_per_trajectory"] == pytest.approx(sum(wanted) / len(each))
    assert metrics["actor/pg_clipfrac_per_trajectory"] == pytest.approx(sum(wanted[:2]) / len(each))


def test_rates_are_also_given_for_each_sign() -> None:
    batch, objective = a_batch(), PolicyObjective.preset("ctpo")
    found = stats(batch, objective)
    metrics, counts = position_metrics(found, found), reference(batch, objective)
    up, down = (
        sum(sum(x for x, a in zip(s.loss, s.advantage, strict=True) if k * a > 0) for s in batch) for k in (1, -1)
    )
    assert metrics["pg_update/clip/pos_adv_token_count"] == up and metrics["pg_update/clip/neg_adv_token_count"] == down
    assert metrics["pg_update/clip/high/rate_of_positive"] == counts.high / up > 0
    assert metrics["pg_update/clip/low/rate_of_negative"] == counts.low / down > 0


@pytest.mark.parametrize("name", PRESETS)
def test_what_bounds_do_to_uncertain_tokens(name: str) -> None:
    batch, objective = a_batch(**DRAWN.get(name, {})), PolicyObjective.preset(name)
    sampler = a_sampler(batch)
    found, p = stats(batch, objective, sampler=sampler), iter(sampler.log_probs.exp().tolist())
    tokens: dict[str, float] = defaultdict(float)
    for s, cuts in zip(batch, reference(batch, objective).cut, strict=True):
        for loss, a, cut in zip(s.loss, s.advantage, cuts, strict=True):
            if next(p) < 0.5 and loss and a:
                sign = "positive" if a > 0 else "negative"
                tokens[sign] += 1
                for side, was in zip(("high", "low", "dual"), cut, strict=True):
                    tokens[f"{side}_of_{sign}"] += was
    assert found.column("n_uncertain").sum(1).tolist() == [tokens[sign] for sign in SIGNS]
    metrics = position_metrics(found, found)
    for side, sign in (("high", "positive"), ("low", "negative"), ("dual", "negative")):
        rate = metrics[f"pg_update/clip/{side}/rate_of_{sign}_uncertain"]
        assert rate == pytest.approx(tokens[f"{side}_of_{sign}"] / tokens[sign])
        assert 0 < tokens[sign] < found.column("n_loss").sum(1)[SIGNS.index(sign)]
    of_both = tokens["high_of_positive"] + tokens["low_of_negative"]
    assert (of_both > 0) == (name != "sapo")
    unknown = stats(batch, objective)
    assert not any("uncertain" in metric for metric in position_metrics(unknown, unknown))


def test_the_sampler_against_the_trainer_by_position_and_by_age() -> None:
    batch = a_batch()
    sampler = a_sampler(batch)
    found = stats(batch, PolicyObjective.preset("ctpo"), sampler=sampler)
    assert sampler.trainer is not None
    difference = iter((sampler.trainer - sampler.log_probs).tolist())
    age = iter((VERSION - sampler.weight_version).tolist())
    by_bin: dict[tuple[int, str], list[float]] = defaultdict(list)
    by_age: dict[tuple[int, str], list[float]] = defaultdict(list)
    for s in batch:
        t, prefix = 0, 0.0
        for model in s.model:
            m, old = next(difference), min(next(age), AGES - 1)
            if model:
                t, prefix = t + 1, prefix + m
                values = {"n": 1.0, "n_known": 1.0, "m": m, "m2": m * m, "M": prefix, "M2": prefix * prefix}
                for name, value in values.items():
                    by_bin[bin_by_definition(t), name].append(value)
                    by_age[old, name].append(value)
    for table, known, names in ((found.sampler, by_bin, SAMPLER_COLUMNS), (found.ages, by_age, AGE_COLUMNS)):
        expected = [[math.fsum(known[place, name]) for name in names] for place in range(len(table))]
        np.testing.assert_allclose(table, expected, rtol=1e-6, atol=1e-6)
    assert found.ages[-1, 0] > 2 * found.ages[-2, 0], "later ages are together in the last"


def test_without_the_trainers_log_probs_before_the_updates_only_ages_are_known() -> None:
    batch = a_batch()
    found = stats(batch, PolicyObjective.preset("ctpo"), sampler=a_sampler(batch, known=False))
    assert found.ages[:, 0].sum() == sum(sum(s.model) for s in batch) and not found.ages[:, 1:].any()
    assert not found.sampler.any()
    assert not stats(batch, None).ages.any()


def test_quantiles_are_right_to_one_bin() -> None:
    batch, objective = a_batch(3, spread=0.02), PolicyObjective.preset("ctpo")
    found = stats(batch, objective)
    assert found.histogram.shape == (HISTOGRAM_BINS,)
    ratios = np.log(sorted(reference(batch, objective).ratio))
    for share in (0.01, 0.25, 0.5, 0.75, 0.9, 0.99):
        exact = float(np.quantile(ratios, share, method="inverted_cdf"))
        assert quantile(found.histogram, share) == pytest.approx(exact, rel=10 ** (1 / 64) - 1)
    ranks = {f"pg_update/is_ratio/p{p}" for p in (25, 50, 75, 90, 95, 99)}
    assert ranks < set(position_metrics(found, found))


def test_of_a_users_objective_there_is_no_ratio_and_no_clip() -> None:
    found = stats(a_batch(), None)
    assert found.column("S2").any() and not any(found.column(name).any() for name in ("x", "clip_high", "clip_low"))
    assert not found.histogram.any() and math.isnan(quantile(found.histogram, 0.5))


def test_entropy_is_summed_where_it_is_known() -> None:
    batch = a_batch()
    entropy = torch.rand(sum(map(len, batch)), generator=torch.Generator().manual_seed(0))
    found = stats(batch, PolicyObjective.preset("ctpo"), entropy)
    model = packed(batch)["response_mask"] > 0
    assert found.column("entropy").sum() == pytest.approx(float(entropy[model].double().sum()), rel=1e-12)
    assert np.array_equal(found.column("n_entropy"), found.column("n"))
    assert not stats(batch, PolicyObjective.preset("ctpo")).column("n_entropy").any()


def test_of_what_no_pass_runs_over_only_the_numbers_are_known() -> None:
    batch = a_batch()
    for s in batch:
        s.advantage = [0.0] * len(s)
    passed = stats(batch, PolicyObjective.preset("ctpo"))
    skipped = skipped_stats((np.array(s.model, bool), np.array(s.loss, bool)) for s in batch)
    for name in ("n", "n_loss"):
        assert np.array_equal(skipped.column(name), passed.column(name))
    assert not any(skipped.column(name).any() for name in COLUMNS if name not in ("n", "n_loss"))
    assert skipped.shares.tolist() == passed.shares.tolist() == [0, 0, 0, sum(any(s.loss) for s in batch)]


def test_a_record_is_read_back() -> None:
    batch = a_batch()
    found = stats(batch, PolicyObjective.preset("ctpo"), sampler=a_sampler(batch))
    record = json.loads(json.dumps(found.record(), allow_nan=False))
    again = PositionStats.of_record(record)
    for name in COUNTS:
        assert np.array_equal(again.column(name), found.column(name))
    for name in SUMS:
        np.testing.assert_allclose(again.column(name), found.column(name), rtol=1e-12)
    assert np.array_equal(again.histogram, found.histogram)
    for name in ("sampler", "ages"):
        assert getattr(found, name).any()
        np.testing.assert_allclose(getattr(again, name), getattr(found, name), rtol=1e-7)
        del record[name]  # as version 0.2 wrote it
        assert not getattr(PositionStats.of_record(record), name).any()


def test_a_record_of_long_responses_is_small() -> None:
    batch = random_batch(0, [8_000] * 4, 0.05)
    found = stats(batch, PolicyObjective.preset("ctpo"), sampler=a_sampler(batch))
    record = {"step": 100_000, "mini_batch": "all"} | found.record()
    assert len(json.dumps(record, separators=(",", ":"))) <= 25_000


def test_a_broken_token_is_null_and_no_count_is_lost() -> None:
    batch = a_batch()
    batch[0].log_probs[[i for i, m in enumerate(batch[0].model) if m][3]] = math.nan
    found = stats(batch, PolicyObjective.preset("ctpo"))
    assert found.column("n").sum() == sum(sum(s.model) for s in batch)
    assert None in (found.record()["positive"]["S"] + found.record()["negative"]["S"])
