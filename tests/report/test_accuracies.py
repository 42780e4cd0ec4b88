"""Accuracies and differences of groups, from dumps of evaluations: pairs, missing verdicts, seeds, and words."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from ctpo_megatron.report.accuracies import compare_accuracies
from ctpo_megatron.report.comparison import Comparison, TextTable, difference_table, value_table
from ctpo_megatron.report.confidence import seeds_interval
from ctpo_megatron.report.endpoints import UNDECIDED, Endpoint, GroupDifference
from ctpo_megatron.report.estimates import ONE_SEED, ScoredProblem, ScoredSet, difference, mean_score
from ctpo_megatron.report.groups import groups_of
from ctpo_megatron.report.run_data import RunData
from ctpo_megatron.run import open_run_directory
from ctpo_megatron.tracking import MetricsWriter, write_trajectories
from tests.tracking.synthetic_run import decode, make_config, make_groups

Scores = list[float | None]
ACCURACY = Endpoint("accuracy, s", scale=100, unit="points")


def problems(scores: Scores, answer: str = "a", first: int = 0) -> ScoredSet:
    return {f"p{first + number}": ScoredProblem(f"{answer}{number}", score) for number, score in enumerate(scores)}


def drawn(chance: float, count: int = 200, seed: int = 0) -> Scores:
    return [*(np.random.default_rng(seed).random(count) < chance).astype(float)]


@pytest.fixture
def write(tmp_path: Path):
    """Writes a run with the rewards of evaluations: step -> rewards of each problem's samples."""

    def write_run(
        preset: str,
        seed: int,
        rewards: Mapping[int, list[list[float | None]]],
        answer: str = "2",
    ) -> RunData:
        config = make_config(tmp_path, f"{preset}-{seed}-{answer}", run={"seed": seed}, objective={"preset": preset})
        directory = open_run_directory(config)
        for step, scores in rewards.items():
            groups = make_groups(random.Random(0), len(scores), len(scores[0]), 0.5)
            for group, of_problem in zip(groups, scores, strict=True):
                group.prompt = replace(group.prompt, answer=answer)
                for trajectory, reward in zip(group.trajectories, of_problem, strict=True):
                    trajectory.reward = reward
            write_trajectories(directory, step, groups, decode, folder="evaluation")
        with MetricsWriter(directory) as metrics:
            for step in range(1, max(rewards) + 1):
                metrics.log(step, {"reward/mean": step / 100})
        return RunData.load(directory)

    return write_run


def test_the_figures_of_two_groups(write) -> None:
    """Two seeds each, two samples a problem, one problem without a verdict on one side, one partly judged."""
    runs = [
        write("ctpo", 0, {0: [[0, 0]] * 4, 3: [[1, 1], [1, 0], [0, 0], [None, None]]}),
        write("ctpo", 1, {0: [[0, 0]] * 4, 3: [[1, 1], [0, 0], [0, 1], [1, 1]]}),
        write("grpo", 0, {0: [[0, 0]] * 4, 2: [[1, 1]] * 4, 3: [[1, 0], [0, 0], [0, 0], [1, 1]]}),
        write("grpo", 1, {3: [[1, None], [0, 0], [0, 0], [1, 1]]}),
    ]
    (found,) = compare_accuracies(groups_of(runs))
    assert found.endpoint.name == "accuracy, toolmath"
    assert [*found.values] == ["ctpo", "grpo"]
    ctpo, grpo = found.values.values()
    # Problem 3 has no verdict in one seed of ctpo: three are left of ctpo, four of grpo.
    assert ctpo.value == pytest.approx((1 + 1 + 0.5 + 0 + 0 + 0.5) / 6)
    assert grpo.value == pytest.approx((0.5 + 1 + 1 + 1) / 8)
    assert (ctpo.left_out, grpo.left_out) == (1, 0)
    (pair,) = found.differences
    assert (pair.group, pair.other) == ("grpo", "ctpo")
    assert pair.estimate.value == pytest.approx(((0.5 - 1) + (1 - 1) - 0.5 + 0 + 0 - 0.5) / 6)
    assert (pair.estimate.left_out, pair.estimate.over) == (1, "problems and seeds")
    assert pair.verdict.startswith(f"{UNDECIDED} (80 % power for ")


def test_runs_of_other_lengths_are_compared_at_the_last_common_step(write) -> None:
    """The longer run is better at its end, and equal at the step that both have."""
    right, wrong = [[1.0]] * 30, [[0.0]] * 30
    runs = [
        write("ctpo", 0, {0: wrong, 2: wrong, 4: right, 7: right}),
        write("grpo", 0, {0: wrong, 2: wrong, 5: wrong}),
    ]
    compared = Comparison(runs, groups_of(runs))
    (found,) = compared.accuracies
    assert [accuracy.value for accuracy in found.values.values()] == [0.0, 0.0]
    assert [pair.estimate.value for pair in found.differences] == [0.0]
    assert compared.notes[:2] == [
        "Accuracies are compared after step 2, the last one evaluated in all runs (last ones: ctpo-0-2 7, grpo-0-2 5).",
        "Rewards and tool use are compared at step 5, the last one that all runs have.",
    ]
    rewards = [[round(values["reward, last 5 steps"], 3) for values in results] for _, results in compared.results]
    assert rewards == [[0.03], [0.03]]
    assert [[values["RL steps"] for values in results] for _, results in compared.results] == [[7], [5]]


def test_without_a_common_evaluation_nothing_is_said_to_be_better(write) -> None:
    right, wrong = [[1.0]] * 30, [[0.0]] * 30
    runs = [write("ctpo", 0, {0: wrong, 7: right}), write("grpo", 0, {0: wrong, 5: wrong})]
    compared = Comparison(runs, groups_of(runs))
    (found,) = compared.accuracies
    assert [accuracy.value for accuracy in found.values.values()] == [1.0, 0.0]
    assert found.differences == [] and difference_table(compared.groups, compared.accuracies) is None
    assert compared.notes[0] == (
        "Accuracies are not compared: no step was evaluated in all runs. They are of the last one: "
        "ctpo-0-2 7, grpo-0-2 5."
    )


def test_a_run_that_was_not_evaluated_decides_nothing(write) -> None:
    runs = [write("ctpo", 0, {2: [[1.0]] * 3, 4: [[0.0]] * 3}), write("grpo", 0, {0: [[1.0]] * 3})]
    compared = Comparison(runs, groups_of(runs))
    assert [value.value for source in compared.accuracies for value in source.values.values()] == [0.0]
    assert not any("compared" in note for note in compared.notes)


def test_a_seed_that_was_not_evaluated_is_said(write) -> None:
    runs = [write("ctpo", 0, {3: [[1], [0]]}), write("ctpo", 1, {0: [[1], [0]]})]
    (found,) = compare_accuracies(groups_of(runs))
    assert "no evaluation of seed 1" in found.values["ctpo"].notes
    assert found.values["ctpo"].value == 0.5
    assert "ctpo, accuracy, toolmath: no evaluation of seed 1." in found.notes


def test_repeated_runs_of_a_seed_are_one(write) -> None:
    runs = [write("ctpo", 0, {3: [[1], [0]]}), write("ctpo", 0, {3: [[0], [0]]}, answer="02")]
    (found,) = compare_accuracies(groups_of(runs))
    assert found.values["ctpo"].value == 0.25
    assert found.values["ctpo"].over == "problems"
    assert ONE_SEED in found.values["ctpo"].notes


def test_no_evaluation_is_no_comparison(write) -> None:
    groups = groups_of([write("ctpo", 0, {0: [[1]]})])
    assert compare_accuracies(groups) == []
    assert lines_of(value_table(groups, []))[1][-4:] == ["no", "evaluation,", "no", "reward"]


def test_pairs_are_of_the_same_problem_and_seed() -> None:
    """With pairs, a small difference on hard and easy problems alike is seen; without, the problems hide it."""
    easy = drawn(0.5)
    better = [1.0 if place % 20 == 0 else score for place, score in enumerate(easy)]
    paired = difference({"0": problems(better)}, {"0": problems(easy)})
    unpaired = difference({"0": problems(better)}, {"0": problems(easy, answer="other")})
    assert paired.value == pytest.approx(unpaired.value) and paired.value > 0
    assert paired.interval and unpaired.interval
    assert paired.interval[0] >= 0 > unpaired.interval[0]
    assert "not paired: the groups have other problems" in unpaired.notes


def test_equal_ids_of_other_problems_are_not_paired() -> None:
    """A task made with another seed has the same ids. Each seed has its own, and both sides have them."""
    left = {str(seed): problems(drawn(0.7, seed=seed), f"{seed}:") for seed in range(3)}
    right = {str(seed): problems(drawn(0.4, seed=seed + 9), f"{seed}:") for seed in range(3)}
    found = difference(left, right)
    less = [np.subtract(drawn(0.7, seed=seed), drawn(0.4, seed=seed + 9)).tolist() for seed in range(3)]
    assert found.over == "seeds" and found.interval == seeds_interval([less], (-1.0, 1.0))
    assert found.value == pytest.approx(np.mean(less))
    own = mean_score(left)
    assert own.interval == seeds_interval([[drawn(0.7, seed=seed) for seed in range(3)]], (0.0, 1.0))


def test_seeds_of_one_side_alone() -> None:
    """Common seeds are paired; with fewer than two, no seeds are, and the spread of both sides counts."""
    many = {str(seed): problems(drawn(0.6, seed=seed)) for seed in range(4)}
    paired = difference(many, {seed: many[seed] for seed in ("1", "2")})
    assert (paired.value, paired.notes) == (0, ["paired by seed, without 0, 3"])
    other = {"7": problems(drawn(0.6, seed=7)), "8": problems(drawn(0.6, seed=8))}
    apart = difference(many, other)
    assert apart.notes == ["not paired by seed"]
    assert apart.over == "problems and seeds" and apart.interval is not None
    ours, theirs = (
        [problems(drawn(0.6, seed=seed), first=1000 * seed) for seed in seeds] for seeds in ((1, 2, 3), (4, 5))
    )
    own = difference(dict(zip("abc", ours, strict=True)), dict(zip("de", theirs, strict=True)))
    scores = [[[each.score for each in side.values()] for side in sides] for sides in (ours, theirs)]
    assert own.over == "seeds" and own.interval == seeds_interval(scores, (-1.0, 1.0))
    single = difference(many, {"9": problems(drawn(0.6, seed=9))})
    assert single.over == "problems"
    assert ONE_SEED in single.notes


def test_one_seed_says_that_it_is_one() -> None:
    found = difference({"0": problems(drawn(0.9))}, {"0": problems(drawn(0.2))})
    assert (found.over, found.notes) == ("problems", [ONE_SEED])
    said = GroupDifference("a", "b", ACCURACY, found)
    assert said.verdict.startswith("a is 66.5 points above b (95 % interval +") and said.verdict.endswith(ONE_SEED)
    assert said.short_verdict == "above (one seed)"


def test_equal_answers_cannot_be_told_apart() -> None:
    same = {"0": problems(drawn(0.5))}
    found = difference(same, same)
    assert found.value == 0 and found.interval
    low, high = found.interval
    assert low == -high and 0.01 < high < 0.03  # 200 problems without a difference leave 1.8 %
    assert GroupDifference("a", "b", ACCURACY, found).short_verdict == f"{UNDECIDED} (one seed)"


def test_no_common_verdict_is_said() -> None:
    found = difference({"0": problems([1.0, None])}, {"0": problems([None, 1.0])})
    assert math.isnan(found.value) and found.interval is None and found.left_out == 2
    said = GroupDifference("a", "b", ACCURACY, found)
    assert said.verdict == f"not known: {ONE_SEED}; no problem is judged on both sides"


def test_scores_beyond_one_have_no_bounds() -> None:
    found = mean_score({"0": problems([3.0, 2.0, 3.0, -2.0, 3.0])})
    assert found.interval and found.interval[0] < 1 < found.interval[1] <= 3


def lines_of(table: TextTable | None) -> list[list[str]]:
    """Words of each line on a terminal of 80 columns."""
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    assert table is not None
    console.print(table.drawn())
    return [line.split() for line in console.export_text().splitlines()]


def test_the_tables_say_it_all(write) -> None:
    right, wrong = [[1.0]] * 30, [[0.0]] * 30
    runs = [
        write("ctpo", 0, {3: right}),
        write("ctpo", 1, {3: [[0.0], *right[1:]]}),
        write("grpo", 0, {3: [*right[:3], *wrong[3:]]}),
        write("grpo", 1, {3: [*right[:2], *wrong[2:]]}),
    ]
    groups = groups_of(runs)
    found = compare_accuracies(groups)
    head, *rows = lines_of(value_table(groups, found))
    assert " ".join(head) == "seeds steps endpoint value 95 % interval"
    assert [" ".join(row[:6]) for row in rows] == [
        "ctpo 2 3 accuracy, toolmath 0.983",
        "grpo 2 3 accuracy, toolmath 0.083",
    ]
    assert all(len(row) == 9 for row in rows)
    head, *rows = lines_of(difference_table(groups, found))
    assert " ".join(head) == "group endpoint minus ctpo 95 % interval visible verdict"
    (row,) = rows
    assert (*row[:4], row[-1]) == ("grpo", "accuracy,", "toolmath", "-0.900", "below") and 0 < float(row[-2]) < 0.9
    assert [note for each in found for note in each.notes] == []
    assert difference_table(groups[:1], compare_accuracies(groups[:1])) is None
