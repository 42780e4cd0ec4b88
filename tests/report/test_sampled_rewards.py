"""Mean reward over all steps and steps to a threshold: values, pairs, runs that never get there, what can be seen."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from scipy import stats

from benchmarks.intervals import LEAST, MOST, Accuracies, Rewards, covered
from ctpo_megatron.cli import main
from ctpo_megatron.report import Comparison
from ctpo_megatron.report.endpoints import UNDECIDED, EndpointComparison
from ctpo_megatron.report.groups import RunGroup
from ctpo_megatron.report.power import visible_difference
from ctpo_megatron.report.run_data import RunData
from ctpo_megatron.report.sampled_rewards import compare_rewards, halfway, notes_of_rewards
from tests.report.test_comparison_page import write_runs

Curves = dict[str, list[float | None]]


def group(label: str, curves: Curves) -> RunGroup:
    """A group of runs, seed -> rewards of its steps; `0a`, `0b` repeat seed 0."""
    by_seed: dict[str, tuple[RunData, ...]] = {}
    for name, rewards in curves.items():
        metrics = [{"step": step, "reward/mean": reward} for step, reward in enumerate(rewards, start=1)]
        run = replace(RunData(Path(label), {"run": {"name": f"{label}-{name}"}}, {}, [], [], {}), metrics=metrics)
        seed = name.rstrip("ab")
        by_seed[seed] = (*by_seed.get(seed, ()), run)
    return RunGroup(label, by_seed, {})


def compared(*groups: RunGroup, threshold: float | None = 0.5) -> tuple[EndpointComparison, EndpointComparison]:
    mean, steps = compare_rewards(groups, threshold)
    return mean, steps


CTPO = {"0": [0.1, 0.3, 0.6, 0.7], "1": [0.2, 0.4, 0.5, 0.7], "2": [0.0, 0.2, 0.4, 0.6]}
GRPO = {"0": [0.1, 0.4, 0.7, 0.8], "1": [0.2, 0.4, 0.6, 0.7], "2": [0.0, 0.1, 0.2, 0.4]}


def test_the_mean_reward_is_paired_by_seed() -> None:
    mean, _ = compared(group("ctpo", CTPO), group("grpo", GRPO))
    ctpo, grpo = ([fmean(rewards) for rewards in curves.values()] for curves in (CTPO, GRPO))
    assert [value.value for value in mean.values.values()] == pytest.approx([fmean(ctpo), fmean(grpo)])
    less = np.subtract(grpo, ctpo)
    (found,) = mean.differences
    assert (found.group, found.other, found.estimate.over) == ("grpo", "ctpo", "seeds")
    assert found.estimate.value == pytest.approx(less.mean())
    assert found.estimate.interval == pytest.approx(tuple(stats.ttest_1samp(less, 0).confidence_interval(0.95)))
    assert mean.values["ctpo"].interval == pytest.approx(tuple(stats.ttest_1samp(ctpo, 0).confidence_interval()))


def test_a_run_that_never_gets_there_counts_as_one_step_more_than_it_had() -> None:
    _, steps = compared(group("ctpo", CTPO), group("grpo", GRPO))
    ctpo, grpo = steps.values.values()
    assert ctpo.value == pytest.approx((3 + 3 + 4) / 3) and ctpo.notes == []
    assert grpo.value == pytest.approx((3 + 3 + 5) / 3)
    (found,) = steps.differences
    assert found.estimate.value == pytest.approx(1 / 3)
    assert found.verdict.startswith(f"{UNDECIDED} (80 % power for ") and found.verdict.endswith(" steps)")
    (note,) = steps.notes
    assert note == "grpo, steps to 0.5: 1 of 3 runs did not get there in 4 steps and count as 5."


def test_runs_that_agree_leave_what_rounding_and_other_seeds_leave() -> None:
    """Steps are whole, so equal ones are no proof; if nobody got there, hardly anything is known."""
    up, flat = [0.1, 0.6, 0.7, 0.8], [0.1, 0.1, 0.1, 0.2]
    agree = compared(group("a", dict.fromkeys("012", up)), group("b", dict.fromkeys("012", up)))[1].differences[0]
    half = stats.t.ppf(0.975, 2) * np.sqrt(2 / 12 / 3)
    assert agree.estimate.interval == pytest.approx((-half, half))
    never = compared(group("a", dict.fromkeys("012", flat)), group("b", dict.fromkeys("012", flat)))[1].differences[0]
    assert never.estimate.interval == pytest.approx((-4 * (1 - 0.025 ** (1 / 3)), 4 * (1 - 0.025 ** (1 / 3))))
    alone = compared(group("a", dict.fromkeys("012", flat)), group("b", dict.fromkeys("012", up)))[1]
    assert alone.values["a"].interval == pytest.approx((5 - 4 * (1 - 0.025 ** (1 / 3)), 5.0))
    assert alone.differences[0].estimate.value == -3 and alone.differences[0].short_verdict == UNDECIDED


def test_repeated_runs_count_once_and_a_seed_alone_has_no_interval() -> None:
    twice = {"0a": [0.1, 0.9], "0b": [0.3, 0.9]}
    mean, steps = compared(group("a", twice), group("b", {"0": [0.6, 0.8]}))
    assert mean.values["a"].value == pytest.approx(0.55) and mean.values["a"].interval is None
    (found,) = mean.differences
    assert found.estimate.value == pytest.approx(0.15) and found.estimate.visible is None
    assert found.verdict == "not known: one seed: says nothing about other seeds"
    assert steps.values["a"].value == 2 and steps.differences[0].estimate.value == -1


def test_seeds_of_one_side_alone_are_not_paired() -> None:
    other = dict(zip("345", GRPO.values(), strict=True))
    (found,) = compared(group("ctpo", CTPO), group("grpo", other))[0].differences
    paired = compared(group("ctpo", CTPO), group("grpo", GRPO))[0].differences[0].estimate
    assert found.estimate.notes == ["not paired by seed"] and found.estimate.value == pytest.approx(paired.value)
    assert found.estimate.interval and paired.interval
    assert np.ptp(found.estimate.interval) > np.ptp(paired.interval)
    some = compared(group("ctpo", CTPO), group("grpo", {"0": GRPO["0"], "1": GRPO["1"], "9": [0.1] * 4}))[0]
    assert some.differences[0].estimate.notes == ["paired by seed, without 9, 2"]
    assert "grpo against ctpo, mean reward: paired by seed, without 9, 2." in some.notes


def test_only_steps_that_all_runs_have_count() -> None:
    longer = {seed: [*rewards, 1.0, 1.0] for seed, rewards in CTPO.items()}
    (found,) = compared(group("ctpo", longer), group("grpo", CTPO))[0].differences
    assert found.estimate.value == 0
    gap = compared(group("a", {"0": [0.2, None, 0.4]}), group("b", {"0": [0.2, 0.2, 0.2]}))[0]
    assert [value.value for value in gap.values.values()] == pytest.approx([0.3, 0.2])


def test_the_threshold_is_halfway_up_unless_it_is_given() -> None:
    groups = [group("ctpo", CTPO), group("grpo", GRPO)]
    first = fmean([0.1, 0.2, 0.0] * 2)
    last = max(fmean(map(fmean, curves.values())) for curves in (CTPO, GRPO))
    assert halfway(groups, 4) == round((first + last) / 2, 2)
    assert compare_rewards(groups, None)[1].endpoint.name == f"steps to {round((first + last) / 2, 2):g}"
    falling = group("ctpo", {"0": [0.5, 0.4]})
    assert halfway([falling], 2) is None and len(compare_rewards([falling], None)) == 1
    assert compare_rewards([group("ctpo", {"0": [None]})], None) == []


def test_rewards_of_a_recording_are_not_compared() -> None:
    """They are the same for every objective that is trained on it."""
    sampled, replayed = group("ctpo", CTPO), group("grpo", CTPO)
    for runs in replayed.by_seed.values():
        runs[0].config["rollout"] = {"replay": "runs/recording"}
    assert compare_rewards([replayed], 0.5) == []
    (mean, _) = compare_rewards([sampled, replayed], 0.5)
    assert [*mean.values] == ["ctpo"] and mean.differences == []
    (note, *_) = notes_of_rewards([sampled, replayed])
    assert note == "Rewards of a replay are the recording's and say nothing of the run: grpo-0, grpo-1, grpo-2."


def test_the_visible_difference_is_seen_in_four_of_five() -> None:
    """Known variance: the sum of the quantiles. Few degrees: the power of Student's t, by its own distribution."""
    assert visible_difference([(1.0, 1e7)], (-1.96, 1.96)) == pytest.approx(1.96 + 0.8416, abs=1e-3)
    for count in (2, 3, 5, 10):
        freedom = count - 1
        spread = stats.chi2.median(freedom) / freedom  # what the variance 1 is estimated as in half of all cases
        away = visible_difference([(spread / count, freedom)], (0.0, 0.0)) * np.sqrt(count)
        assert stats.nct.sf(stats.t.ppf(0.975, freedom), freedom, away) == pytest.approx(0.8, abs=2e-3)
    wide, narrow = (visible_difference([(0.01, 3)], (-half, half)) for half in (0.6, 0.3))
    assert wide == pytest.approx(narrow * 0.6 / (stats.t.ppf(0.975, 3) * 0.1))
    assert visible_difference([(0.0, 3)], (-0.3, 0.3)) == 0.3


@pytest.mark.parametrize(
    ("case", "most"),
    [
        (Rewards(3, None, 0.3), MOST),
        (Rewards(3, 0.7), 1.0),
        (Rewards(3, None, paired=False), 1.0),
        *(pytest.param(Rewards(seeds, None), MOST, marks=pytest.mark.slow) for seeds in (2, 5)),
        *(pytest.param(Rewards(3, threshold, 0.3), 1.0, marks=pytest.mark.slow) for threshold in (0.5, 0.75)),
    ],
)
def test_intervals_cover_other_seeds(case: Rewards, most: float) -> None:
    """In 300 comparisons; 1,000 of more cases are in benchmarks/results/intervals.md."""
    coverage, apart, _ = covered(case, 300)
    assert LEAST - 0.02 <= coverage <= most + 0.01
    assert case.slower or apart <= 0.07


@pytest.mark.parametrize(
    "case",
    [
        Rewards(3, None),
        *(pytest.param(case, marks=pytest.mark.slow) for case in (Rewards(5, 0.7), Accuracies(1, 100, 1, 0, 0))),
    ],
)
def test_a_visible_difference_is_mostly_seen(case: Rewards | Accuracies) -> None:
    larger = case.with_difference(covered(case, 200)[2])
    assert larger is not None and 0.7 <= covered(larger, 300, seed=6)[1] <= 0.93


def test_the_page_and_the_terminal_have_all_endpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = write_runs(tmp_path, steps=6, only="reward/")
    out = tmp_path / "page.html"
    assert main(["compare", *map(str, runs), "--out", str(out), "--threshold", "0.4"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "mean reward" in printed and "steps to 0.4" in printed and "visible" in printed
    page = out.read_text(encoding="utf-8")
    assert re.search(r"<th>mean reward</th><td>grpo against ctpo</td>", page)
    assert re.search(r"(cannot be told apart \(80 % power for |is [\d.]+ (steps )?(above|below))", page)


def test_tuned_keys_do_not_confound(tmp_path: Path) -> None:
    runs = write_runs(tmp_path, steps=2, seeds=2, only="reward/")
    for run in runs[:2]:
        config = run / "config.yaml"
        config.write_text(re.sub(r"^    lr: .*$", "    lr: 0.25", config.read_text(), flags=re.MULTILINE))
    assert any("differs from ctpo in 2 keys" in note for note in Comparison.load(runs).notes)
    (runs[0].parent / "tuning.json").write_text(json.dumps({"keys": ["policy.optimizer.lr"]}))
    notes = Comparison.load(runs).notes
    assert not any("differs from" in note for note in notes)
    assert any(note.startswith("policy.optimizer.lr was picked for each on other seeds: ctpo 0.25, ") for note in notes)
