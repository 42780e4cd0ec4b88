"""Reward functions as TRL and verl call them, in the adapters of docs/coming_from.md."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from ctpo_megatron.checks import check_extensions
from ctpo_megatron.config import ConfigError, load_config
from ctpo_megatron.config.schema import RewardConfig
from ctpo_megatron.data import Group, Prompt, Trajectory
from ctpo_megatron.rewards import RewardPool, ScoreReport
from tests.extend.document_examples import DOCS, example

TRL = """
import re

def accuracy_reward(completions, solution, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [float(truth in text) if truth else None for text, truth in zip(texts, solution)]

def format_reward(prompts, completions, level, **kwargs):
    asked = [messages[-1]["content"] for messages in prompts]
    boxed = ["boxed" in completion[-1]["content"] for completion in completions]
    return [None if "any form" in text else float(box) + hard for text, box, hard in zip(asked, boxed, level)]
"""
VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = float(ground_truth in solution_str)
    if data_source == "plain":
        return right
    return {"score": right - extra_info["level"], "acc": right > 0, "pred": solution_str, "level": extra_info["level"]}
"""
FUNCTIONS = {"trl rewards": ("my_rewards.py", TRL), "verl rewards": ("my_reward.py", VERL)}


def adapter(name: str, folder: Path) -> RewardConfig:
    """The adapter of the page next to a user's functions, and the configuration that names it."""
    file, code = FUNCTIONS[name]
    _, settings = example(name, folder, DOCS / "coming_from.md")
    (folder / file).write_text(code)
    return RewardConfig(**yaml.safe_load(settings)["reward"])


def scored(config: RewardConfig, folder: Path, *groups: Group) -> ScoreReport:
    with RewardPool(config, [str(folder)]) as pool:
        return asyncio.run(pool.score(groups))


def answered(text: str, source: str = "mine", answer: str = "42", question: str = "6 * 7?") -> Group:
    prompt = Prompt("p", source, ({"role": "user", "content": question},), answer, (), {"level": 0.5})
    return Group(prompt, [Trajectory("p", 0, 0, final_text=text)])


def rewards(*groups: Group) -> list[float | None]:
    return [group.trajectories[0].reward for group in groups]


def test_functions_of_trl_are_added_up_by_weight(tmp_path: Path) -> None:
    """Where none of them knows, there is no verdict."""
    any_form = "In any form: 6 * 7?"
    groups = [answered(r"\boxed{42}"), answered("43"), answered("42", question=any_form)]
    unknown = answered("42", answer="", question=any_form)
    report = scored(adapter("trl rewards", tmp_path), tmp_path, *groups, unknown)
    assert rewards(*groups) == pytest.approx([1.0 + 0.2 * 1.5, 0.2 * 0.5, 1.0]) and rewards(unknown) == [None]
    assert groups[0].trajectories[0].reward_components == {"accuracy_reward": 1.0, "format_reward": 1.5}
    assert groups[2].trajectories[0].reward_components == {"accuracy_reward": 1.0}
    assert report == ScoreReport(3, {"none": 1}, {"accuracy_reward": pytest.approx(2 / 3), "format_reward": 1.0})


def test_the_column_and_the_weights_of_trl_may_be_left_out(tmp_path: Path) -> None:
    config = adapter("trl rewards", tmp_path)
    code = "def right(completions, answer, **_):\n    return [float(answer[0] in completions[0][0]['content'])]\n"
    (tmp_path / "others.py").write_text(code)
    arguments = {"functions": ["others:right"], "answer": "answer"}
    function = config.function.model_copy(update={"arguments": arguments})
    group = answered("42")
    scored(config.model_copy(update={"function": function}), tmp_path, group)
    assert rewards(group) == [1.0]


def test_a_function_of_verl_gives_its_score_and_metrics(tmp_path: Path) -> None:
    groups = [answered("42"), answered("43"), answered("42", source="plain")]
    report = scored(adapter("verl rewards", tmp_path), tmp_path, *groups)
    assert rewards(*groups) == [0.5, -0.5, 1.0]
    assert report == ScoreReport(3, {}, {"acc": 1.0, "level": 0.5})


FOREIGN = """
def format_reward(completions, **kwargs):
    return [1.0]

class Accuracy:
    def __call__(self, prompts, completions, solution, **kwargs):
        return [1.0]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0

def needs_more(trajectory, prompt, weight):
    return weight
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("format_reward", "TRL calls such functions: docs/coming_from.md has an adapter"),
        ("Accuracy", "TRL calls such functions: docs/coming_from.md has an adapter"),
        ("compute_score", "verl calls such functions: docs/coming_from.md has an adapter"),
        ("needs_more", None),
    ],
)
def test_a_signature_of_another_trainer_is_refused_with_the_page(tmp_path: Path, name: str, said: str | None) -> None:
    (tmp_path / "foreign_rewards.py").write_text(FOREIGN)
    inputs: dict[str, Any] = {"run": {"name": "x", "steps": 1}, "model": {"path": "m"}, "data": {"train": ["x.jsonl"]}}
    inputs |= {"reward": {"function": f"foreign_rewards:{name}"}, "extensions": {"path": [str(tmp_path)]}}
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(inputs))
    with pytest.raises(ConfigError, match="its signature is") as refused:
        check_extensions(load_config(tmp_path / "x.yaml"))
    assert (said in str(refused.value)) if said else ("adapter" not in str(refused.value))
