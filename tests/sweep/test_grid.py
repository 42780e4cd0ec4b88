"""`--grid`: what it means, how runs are named, and every mistake in it by its key."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctpo_megatron.config import ConfigError
from ctpo_megatron.sweep import Grid, GridAxis, read_grid

PRESETS = "objective.preset=ctpo,grpo,ctpo-fixed"


def names(*items: str) -> list[str]:
    grid = read_grid(items, [])
    return [grid.name(point) for point in grid.points()]


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([PRESETS, "run.seed=0,1"], ["ctpo-seed0", "ctpo-seed1", "grpo-seed0", "grpo-seed1"]),
        (["policy.optimizer.lr=1e-6,3e-6"], ["lr1e-6", "lr3e-6"]),
        (["policy.recompute=none,full"], ["recompute_none", "recompute_full"]),
        (["policy.optimizer.lr=1,2", "sft.optimizer.lr=3,4"], ["policy.optimizer.lr1-sft.optimizer.lr3"]),
        (["data.shuffle=true,false"], ["shuffle_true", "shuffle_false"]),
    ],
)
def test_names_are_made_of_what_differs(items: list[str], expected: list[str]) -> None:
    assert names(*items)[: len(expected)] == expected


def test_values_that_a_name_cannot_hold_are_told_apart() -> None:
    first, second, third = names("data.train=[a/b],[a:b],[c]")
    assert len({first, second, third}) == 3
    assert all(re.fullmatch(r"train_a_b\.[0-9a-f]{6}", name) for name in (first, second))
    assert names("data.train=[c],[a/b]") == [third, first]  # by the value alone, not by its place


def test_the_last_key_varies_fastest_and_a_single_value_is_an_override() -> None:
    grid = read_grid([PRESETS, "run.steps=7", "data.eval=[a,b]", "run.seed=0,1", "more.yaml"], ["a.b=1"])
    assert grid.overrides == ("a.b=1", "run.steps=7", "data.eval=[a,b]", "more.yaml")
    assert [axis.key for axis in grid.axes] == ["objective.preset", "run.seed"]
    assert list(grid.points())[:2] == [
        {"objective.preset": "ctpo", "run.seed": "0"},
        {"objective.preset": "ctpo", "run.seed": "1"},
    ]


def test_commas_in_brackets_and_quotes_are_part_of_a_value() -> None:
    (axis,) = read_grid(["a.b=[1,2],{x: 1, y: [2,3]},'p,q',\"r,s\""], []).axes
    assert axis.values == ("[1,2]", "{x: 1, y: [2,3]}", "'p,q'", '"r,s"')


@pytest.mark.parametrize(
    ("items", "overrides", "problem"),
    [
        (["run.seed=0"], [], "no key has more than one value"),
        (["run.seed=0,"], [], 'run.seed = "0,": has an empty value'),
        (["run.seed=0,1,0"], [], 'run.seed = "0,1,0": has 0 twice'),
        (["run.seed=0,1", "run.seed=2,3"], [], 'run.seed = "2,3": is there twice'),
        (["run.seed=0,1"], ["run.seed=4"], 'run.seed = "0,1": is an override, too'),
        (["run.seed=0,1", "run.seed=4"], [], 'run.seed = "0,1": is an override, too'),
        (["objective.preset=ctpo,grpo"], ["objective={preset: gspo}"], "and objective set the same keys"),
        (["run.name=a,b"], [], 'run.name = "a,b": cannot vary: the sweep names the runs'),
        (["run.root=a,b"], [], "cannot vary: the runs of a sweep are in one folder"),
        (["run.resume=true,auto"], [], "cannot vary: a sweep continues what is there"),
    ],
)
def test_a_bad_grid_is_named(items: list[str], overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_grid(items, overrides)
    assert any(problem in str(found) and str(found).startswith("--grid: ") for found in caught.value.problems)


def test_all_mistakes_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        read_grid(["run.name=a,b", "run.seed=1,1"], [])
    assert [problem.key for problem in caught.value.problems] == ["run.name", "run.seed"]


VALUES = st.lists(st.text("ab01-._/ :e", min_size=1, max_size=60), min_size=2, max_size=4, unique=True)


@given(VALUES, VALUES)
def test_every_run_has_a_name_of_its_own_that_a_directory_can_have(first: list[str], second: list[str]) -> None:
    grid = Grid((GridAxis("objective.preset", tuple(first)), GridAxis("a.seed", tuple(second))), ())
    found = [grid.name(point) for point in grid.points()]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+", name) for name in found)
    larger = Grid((GridAxis("objective.preset", (*first, "z")), GridAxis("a.seed", tuple(reversed(second)))), ())
    assert {larger.name(point) for point in grid.points()} == set(found)
