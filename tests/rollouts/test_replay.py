"""A recording in place of engines: what it answers, and what it refuses with step and prompt."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from ctpo_megatron.data.batch import Group
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.engines import EnginePool, Sampling
from ctpo_megatron.rollouts import Quarantined, Replay, ReplayError, Request, ticks

SAMPLING = Sampling(1.0, 1.0, 0)


def generate(replay: Replay, prompts: list[Prompt], replacements: Stream | None = None) -> list[Group]:
    """What the recording has for step 3."""
    return answer(replay, prompts, Request(3, 2, SAMPLING, replacements))


def answer(replay: Replay, prompts: list[Prompt], request: Request) -> list[Group]:
    return [group for answers in ticks(replay, prompts, request, threading.Event()) for _, group in answers.groups]


def prompt(name: str) -> Prompt:
    return Prompt(name, "source", (), "1", (5, 6))


def trajectory(name: str, sample: int) -> Trajectory:
    found = Trajectory(name, sample, seed=0)
    found.append_context([5, 6], turn=0)
    found.append_model([7, 8 + sample], [-0.1, -0.2], [1, 1], turn=1)
    return found


def recording(names: Iterable[str]) -> Callable[[int], list[Trajectory]]:
    return lambda step: [trajectory(name, sample) for name in names for sample in (0, 1)] if step == 3 else []


def replay(*names: str) -> Replay:
    return Replay(recording(names))


def test_groups_come_back_as_recorded_even_when_a_prompt_is_drawn_twice() -> None:
    drawn = [prompt("a"), prompt("b"), prompt("a")]
    groups = generate(replay("a", "b", "a"), drawn)
    assert [group.prompt.id for group in groups] == ["a", "b", "a"]
    assert [[t.token_ids[-1] for t in group.trajectories] for group in groups] == [[8, 9]] * 3


@pytest.mark.parametrize(
    ("drawn", "step", "message"),
    [
        (["a", "c"], 3, r"step 3, prompt 2 of the batch, sample 0: the run draws prompt 'c', .* has prompt 'b'"),
        (["a"], 3, r"step 3: 4 trajectories were recorded, 1 prompts x 2 samples"),
        (["a", "b"], 4, r"step 4: 0 trajectories were recorded, 2 prompts x 2 samples"),
    ],
)
def test_another_draw_is_refused(drawn: list[str], step: int, message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        answer(replay("a", "b"), [prompt(n) for n in drawn], Request(step, 2, SAMPLING))


def test_a_prompt_of_other_tokens_is_refused() -> None:
    other = Prompt("a", "source", (), "1", (5, 9))
    with pytest.raises(ReplayError, match="prompt 'a' was recorded with other tokens"):
        generate(replay("a"), [other])


class Stream:
    """The endless stream of a small data set from prompt number `first` on; counts what was drawn."""

    def __init__(self, names: str, first: int) -> None:
        self.names, self.drawn, self.first = names, 0, first

    def __next__(self) -> Prompt:
        self.drawn += 1
        return prompt(self.names[(self.first + self.drawn - 1) % len(self.names)])


@pytest.mark.parametrize(
    ("recorded", "lost", "draws"),
    [
        ("abc", "", 0),
        ("adc", "b", 1),
        ("aec", "bd", 2),  # what took b's place failed as well
        ("edc", "ab", 2),  # a failed after b did, and got the later draw
        ("dbe", "ac", 2),
    ],
)
def test_a_prompt_that_the_recorded_run_lost_is_replaced_as_there(recorded: str, lost: str, draws: int) -> None:
    stream, found = Stream("abcdefgh", 3), Replay(recording(recorded), max_quarantined=2)
    drawn = [prompt(name) for name in "abc"]
    groups = generate(found, drawn, stream)
    assert [group.prompt.id for group in groups] == list(recorded)
    assert stream.drawn == draws
    assert "".join(record.prompt_id for record in found.quarantined) == lost
    assert found.stats()["quarantined"] == len(lost)


def test_a_prompt_lost_before_counts_once_and_is_passed_over_when_drawn_again() -> None:
    found = Replay(recording("fgd"), max_quarantined=1)
    found.quarantined.append(Quarantined("e", 1, "of the run before"))
    stream = Stream("efghd", 0)
    groups = generate(found, [prompt(n) for n in "eed"], stream)
    assert [group.prompt.id for group in groups] == ["f", "g", "d"]
    assert stream.drawn == 3
    assert len(found.quarantined) == 1


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_a_recording_that_lost_prompts_do_not_explain_is_refused(limit: int) -> None:
    found = Replay(recording("xyz"), max_quarantined=limit)
    with pytest.raises(ReplayError, match=r"step 3, prompt 1 of the batch.*draws prompt 'a', the recording has .*'x'"):
        generate(found, [prompt(n) for n in "abc"], Stream("abcdefgh", 3))
    assert found.quarantined == []


def test_the_counts_have_the_names_of_the_pool() -> None:
    counts = replay("a").stats()
    assert set(counts.values()) == {0.0}
    assert counts.keys() == EnginePool.stats(_WithoutEngines()).keys()


class _WithoutEngines(EnginePool):
    def __init__(self) -> None:
        self.lock, self.counts, self._seconds = threading.RLock(), Counter(), {}
