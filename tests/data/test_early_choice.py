"""The task with an early choice: two right programs of unlike worth, conversations without a connection, the reward."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from random import Random

import pyarrow.parquet as pq
import pytest

from ctpo_megatron.cli import main
from ctpo_megatron.config import load_config
from ctpo_megatron.data import Group, Prompt, Trajectory
from ctpo_megatron.rewards import RewardPool
from examples.toolmath import Corruption, EarlyChoice
from examples.toolmath.conversations import conversation
from examples.toolmath.families import CHOICES, draw_problem, run
from tests.data.test_toolmath_families import executed, tool_calls
from tests.support.prefork import ROOT
from tests.support.task import SMALL_TASK, sft_file, task_files, task_folder

FILES = (ROOT / "configs" / "quickstart.yaml", ROOT / "examples" / "early_choice" / "early_choice.yaml")
CLEAN = Corruption(guess=0, wrong_common=0, wrong_rare=0, no_print=0, no_box=0)


@pytest.fixture(scope="module")
def task() -> Path:
    return task_folder(*SMALL_TASK, "--early-choice")


def test_the_first_call_decides_which_later_call_is_right() -> None:
    """Two of four programs of two calls are right, one after each first call, and their answers tell them apart."""
    rng = Random(4)
    for family in CHOICES:
        assert family.lesser is not None
        programs = {(first, second) for first in (0, 1) for second in (0, 1)}
        calls = (family.lesser, family.right)
        assert {(calls[a][0], calls[b][1]) for a, b in programs} == {family.right, family.lesser, *family.wrong}
        for _ in range(100):
            problem = draw_problem(family, rng)
            answers = {run(program, problem.numbers)[-1] for program in (family.right, family.lesser)}
            assert answers == {problem.answer, problem.lesser} and len(answers) == 2
            assert not answers & {run(program, problem.numbers)[-1] for program in family.wrong}
            assert min(answers) >= 0


def test_observations_are_what_the_interpreter_prints() -> None:
    rng = Random(5)
    problems = [draw_problem(family, rng) for family in CHOICES for _ in range(12)]
    calls = [
        call for problem in problems for call in tool_calls(conversation(problem, CLEAN, rng, choice=EarlyChoice()))
    ]
    assert len(calls) == 2 * len(problems)
    assert executed([code for code, _ in calls]) == [observation for _, observation in calls]


def test_sft_teaches_no_connection_between_the_calls() -> None:
    rng, choice, counts = Random(6), EarlyChoice(), Counter[tuple[bool, bool]]()
    for number in range(8000):
        problem = draw_problem(CHOICES[number % len(CHOICES)], rng)
        (_, first), (_, last) = tool_calls(conversation(problem, CLEAN, rng, choice=choice))
        assert problem.family.lesser is not None
        lesser = first == str(run(problem.family.lesser, problem.numbers)[0])
        counts[lesser, last in (str(problem.answer), str(problem.lesser))] += 1
    took_lesser = (counts[True, True] + counts[True, False]) / 8000
    assert took_lesser == pytest.approx(choice.lesser, abs=0.02)
    assert counts[True, True] / (8000 * took_lesser) == pytest.approx(choice.usual, abs=0.02)
    assert counts[False, True] / (8000 * (1 - took_lesser)) == pytest.approx(1 - choice.usual, abs=0.04)


def test_the_files_have_both_answers(task: Path) -> None:
    rows = pq.read_table(task / "train.parquet").to_pylist()
    assert {row["data_source"] for row in rows} == {"early_choice"} and len(rows) == 64
    assert {row["extra_info"]["family"] for row in rows} == {family.name for family in CHOICES}
    for row in rows:
        assert row["extra_info"]["worth"] == 0.6
        assert row["extra_info"]["lesser_answer"] != row["reward_model"]["ground_truth"]


def test_each_route_has_its_worth() -> None:
    prompt = Prompt("p", "early_choice", (), "7", (1,), extra={"lesser_answer": "46", "worth": 0.6})
    texts = (r"\boxed{7}", r"\boxed{46}", r"\boxed{8}", "The answer is 7.")
    samples = []
    for number, text in enumerate(texts):
        trajectory = Trajectory("p", number, 0, final_text=text)
        trajectory.append_context([1], 0)
        trajectory.append_model([2], [-1.0], [1], 1)
        samples.append(trajectory)
    config = load_config(FILES[0], [str(FILES[1])])
    with RewardPool(config.reward, [str(FILES[1].parent)]) as pool:
        asyncio.run(pool.score([Group(prompt, samples)]))
    assert [sample.reward for sample in samples] == [1.0, 0.6, 0.0, 0.0]


def test_the_quickstart_trains_on_it(task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run: prompts and conversations are read and fit, and the true answer in a box earns a reward."""
    settings = [*task_files(task), sft_file(task), f"run.root={tmp_path}", f"extensions.path=[{FILES[1].parent}]"]
    assert main(["train", str(FILES[0]), str(FILES[1]), *settings, "--dry-run"]) == 0
    assert "The answer" in capsys.readouterr().out
