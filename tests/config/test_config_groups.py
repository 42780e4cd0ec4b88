"""Checks of filters, uniform groups and shaping: settings that could not do what they say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ctpo_megatron.config import Config
from ctpo_megatron.preflight import RunContext
from ctpo_megatron.preflight.configuration import check_training

Make = Callable[..., Config]


def found(config: Config) -> list[str]:
    return [f"{p.severity}: {p}" for p in check_training(RunContext(config))]


@pytest.mark.parametrize(
    ("recorded", "now", "expected"),
    [
        ("keep", ["uniform_groups=refill"], 'uniform_groups = "refill": but rollout.replay was recorded with \'keep'),
        ("refill", ["uniform_groups=drop"], 'uniform_groups = "drop": but rollout.replay was recorded with \'refi'),
        ("refill", ["uniform_groups=refill", "max_refills=3"], "max_refills = 3: but rollout.replay was rec"),
        ("refill", ["uniform_groups=refill"], ""),
        ("keep", ["uniform_groups=drop"], ""),
    ],
)
def test_a_replay_draws_as_the_recorded_run_did(
    config_with: Make, tmp_path: Path, recorded: str, now: list[str], expected: str
) -> None:
    dumps = tmp_path / "old" / "trajectories"
    dumps.mkdir(parents=True)
    (tmp_path / "old" / "config.yaml").write_text(f"rollout: {{uniform_groups: {recorded}, max_refills: 10}}\n")
    for step in range(1, 5):
        (dumps / f"step_{step:06d}.jsonl").touch()
    problems = found(config_with("rollout.replay=old", *(f"rollout.{key}" for key in now)))
    assert len(problems) == bool(expected) and all(expected in problem for problem in problems), problems


def test_training_files_that_are_evaluated_on_are_named(config_with: Make) -> None:
    (text,) = found(config_with("data.eval=[data/heldout.parquet, ./data/train.parquet]"))
    assert text.startswith('warning: data.eval = "./data/train.parquet": is training data too: the accuracy there')


@pytest.mark.parametrize(
    ("train", "held_out"),
    [
        *(("d", "d/a.jsonl"), ("d/a.jsonl", "d"), ("d/*.jsonl", "d/a.jsonl"), ("d/b.jsonl", "d/[ab].jsonl")),
        *(
            ("link.jsonl", "d/a.jsonl"),
            ("linked", "d"),
            ("d/a.jsonl", "linked/*.jsonl"),
            ("d/../d/a.jsonl", "d/a.jsonl"),
        ),
    ],
)
def test_files_are_compared_and_not_what_names_them(
    config_with: Make, tmp_path: Path, train: str, held_out: str
) -> None:
    (tmp_path / "d").mkdir()
    for name in ("a", "b"):
        (tmp_path / "d" / f"{name}.jsonl").touch()
    (tmp_path / "link.jsonl").symlink_to("d/a.jsonl")
    (tmp_path / "linked").symlink_to("d")
    texts = found(config_with(f"data.train=['{train}']", f"data.eval=[other.jsonl, '{held_out}']"))
    (text,) = [text for text in texts if "is training data too" in text]
    assert text.startswith(f'warning: data.eval = "{held_out}": ')


def test_other_files_of_the_same_folder_are_held_out(config_with: Make, tmp_path: Path) -> None:
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).touch()
    texts = found(config_with("data.train=['tr*.jsonl']", "data.eval=['te*.jsonl', test.jsonl]"))
    assert not [text for text in texts if text.startswith("warning: data.eval")]
