"""examples/sampler: from easy prompts to hard ones, and samplers that misbehave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron.base.event_loop import EventLoop
from ctpo_megatron.checks.extensions import check_extensions
from ctpo_megatron.config import ConfigError, Extension, RolloutConfig, load_config
from ctpo_megatron.data import Curriculum, Prompt, PromptSampler
from ctpo_megatron.rollouts import GroupSampler, Rollouts
from ctpo_megatron.tracking import Phases
from tests.extend.scripted import project
from tests.rollouts.scripted import ScriptedEngines, ScriptedScorer, Stops

PROMPTS = [
    Prompt(f"p{n}", "source", ({"role": "user", "content": "x"},), "1", (n,), {"level": 9 - n}) for n in range(10)
]
HARD_FIRST = [f"p{n}" for n in reversed(range(10))]


@pytest.fixture
def part() -> Extension:
    sampler = project("sampler").data.sampler
    assert sampler is not None
    return sampler.model_copy(update={"arguments": sampler.arguments | {"size": 4}})


def ids(prompts: list[Prompt]) -> list[str]:
    return [prompt.id for prompt in prompts]


def rollouts(prompts: Any, reward: float, ahead: int = 0) -> Rollouts:
    config = RolloutConfig(prompts_per_step=4, samples_per_prompt=2, max_staleness=ahead, group_timeout_s=20)
    scorer = ScriptedScorer(lambda prompt, sample: reward)
    sampler = GroupSampler(ScriptedEngines(), config)  # type: ignore[arg-type]
    return Rollouts(config, EventLoop(), sampler, scorer, prompts, Stops(), Phases(), steps=20)  # type: ignore[arg-type]


def train(source: Rollouts, *steps: int) -> list[list[str]]:
    drawn = []
    for step in steps:
        source.publish(None, step)
        batch = source.next_batch(step)
        assert batch is not None
        drawn.append([group.prompt.id for group in batch.groups])
    return drawn


def test_it_goes_from_easy_to_hard(part: Extension) -> None:
    right = train(rollouts(Curriculum(part, PROMPTS, 0), 1.0), 1, 2, 3, 4)
    assert right == [HARD_FIRST[:4], HARD_FIRST[4:8], HARD_FIRST[6:], HARD_FIRST[6:]]
    wrong = train(rollouts(Curriculum(part, PROMPTS, 0), 0.0), 1, 2)
    assert wrong == [HARD_FIRST[:4], HARD_FIRST[:4]]


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("done", [1, 2])
def test_a_checkpoint_has_its_state(part: Extension, ahead: int, done: int) -> None:
    with rollouts(Curriculum(part, PROMPTS, 0), 1.0, ahead) as whole:
        drawn = train(whole, *range(1, 6))
    with rollouts(Curriculum(part, PROMPTS, 0), 1.0, ahead) as first:
        train(first, *range(1, done + 1))
        state = first.state_dict()  # stopped after an update: nothing was published since
    kept = state if ahead else json.loads(json.dumps(state))
    with rollouts(Curriculum(part, PROMPTS, 0), 1.0, ahead) as second:
        second.load_state_dict(kept)
        assert train(second, *range(done + 1, 6)) == drawn[done:]


def test_another_sampler_is_refused(part: Extension) -> None:
    ours, plain = Curriculum(part, PROMPTS, 0), PromptSampler(PROMPTS, 0)
    ours.take(3)
    with pytest.raises(ValueError, match=r"begun without data\.sampler"):
        ours.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match=r"begun with data.sampler easy_to_hard:EasyToHard"):
        plain.load_state_dict(ours.state_dict())
    with pytest.raises(ValueError, match="other tokens or answers"):
        Curriculum(part, PROMPTS[:9], 0).load_state_dict(ours.state_dict())
    with pytest.raises(ValueError, match="seed 0, this run uses seed 1"):
        Curriculum(part, PROMPTS, 1).load_state_dict(ours.state_dict())


BAD = """
import asyncio
class Bad:
    def __init__(self, prompts, seed, *, next="p0", state=None):
        self.given, self.kept = next, state
    def next(self, count):
        if self.given == "interrupt":
            raise asyncio.CancelledError
        return [self.given] * (count if self.given != "few" else 1)
    def learn(self, rewards):
        pass
    def state(self):
        return float("nan") if self.kept == "nan" else self.kept
    def load_state(self, state):
        pass
class Half:
    def next(self, count):
        pass
"""


@pytest.fixture
def bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bad_sampler.py").write_text(BAD)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("other", "returned 'other', which is no prompt's id"),
        (7, "returned 7, which is no prompt's id"),
        ("few", r"next\(2\) returned 1 ids, not 2"),
        ("interrupt", "next failed: .*CancelledError"),
    ],
)
def test_what_it_does_wrong_is_named(bad: Path, given: Any, message: str) -> None:
    stream = Curriculum(Extension(name="bad_sampler:Bad", arguments={"next": given}), PROMPTS, 0)
    with pytest.raises(ValueError, match=f"data.sampler, bad_sampler:Bad: .*{message}"):
        stream.take(2)
    assert stream.taken == 0


def test_a_state_that_is_no_json_is_named(bad: Path) -> None:
    stream = Curriculum(Extension(name="bad_sampler:Bad", arguments={"state": "nan"}), PROMPTS, 0)
    with pytest.raises(ValueError, match=r"data\.sampler, bad_sampler:Bad: state failed: .*JSON"):
        stream.state_dict()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["data.sampler=bad_sampler:Half"], "has no method learn, state, load_state"),
        (["data.sampler=bad_sampler:Nothing"], "has no 'Nothing'"),
        (["data.sampler=easy"], "no such sampler"),
        (["data.sampler={name: 'bad_sampler:Bad', arguments: {to: 1}}"], "cannot be called with"),
        (["data.sampler=bad_sampler:Bad", "data.train=[{path: x, weight: 1}]"], "take the weights out of data.train"),
        (["data.sampler=bad_sampler:Bad", "data.shuffle=false"], "remove data.shuffle"),
    ],
)
def test_it_is_checked_before_a_run(bad: Path, settings: list[str], message: str) -> None:
    config = load_config("configs/quickstart.yaml", [*settings, f"extensions.path=[{bad}]"])
    with pytest.raises(ConfigError, match=f"data.sampler.*{message}"):
        check_extensions(config)
