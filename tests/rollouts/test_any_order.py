"""Batches while anything happens in any order: steps, failing prompts, engines that go, kills, stops, resumes."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.rollouts.scripted import ScriptedEngine, ScriptedEngines
from tests.rollouts.test_rollouts import ORDER, PROMPTS, Run, accounted

STEPS = 1000


class AnyOrder(RuleBasedStateMachine):
    """A run, and what it has to be whatever happens: every prompt accounted for, no token too stale, no step twice."""

    @initialize(
        ahead=st.integers(0, 2),
        partial=st.sampled_from(["continue", "finish"]),
        uniform=st.sampled_from(["keep", "drop", "refill"]),
        oversample=st.integers(0, 2),
    )
    def begin(self, ahead: int, partial: str, uniform: str, oversample: int) -> None:
        self.settings: dict[str, Any] = {"max_staleness": ahead, "partial": partial, "uniform_groups": uniform}
        self.settings |= {"oversample": oversample, "max_quarantined": 20}
        self.lost, self.starts = set[str](), 0
        self.stack, self.saved, self.done = ExitStack(), None, 0
        self._start()

    def _start(self) -> None:
        self.stack.close()
        self.starts += 1
        self.stop = threading.Event()
        start: dict[str, Any] = {"done": self.done, "state": self.saved, "stop": self.stop} | self.settings
        self.run = Run(ScriptedEngines(self.starts, self.lost), steps=STEPS, **start)
        self.stack = ExitStack()
        self.stack.enter_context(self.run.going())

    def _save(self) -> None:
        self.saved, self.done = self.run.state(), self.run.done
        if "ahead" in self.saved:
            drawn = self.saved["prompts"]
            assert accounted(self.saved) == drawn["epoch"] * len(PROMPTS) + drawn["cursor"]
        assert {record["prompt_id"] for record in self.saved["quarantined"]} <= self.lost

    @rule(count=st.integers(1, 3))
    def train(self, count: int) -> None:
        self.run.train(until=self.run.done + count)
        for batch in self.run.trained[-count:]:
            assert len(batch.trained) <= 4 and len({id(group) for group in batch.groups}) == len(batch.groups)
        for step, batch in enumerate(self.run.trained[-count:], start=self.run.done - count + 1):
            assert all(0 <= step - version <= self.settings["max_staleness"] for version in batch.weight_versions)

    @precondition(lambda self: len(self.lost) < 8)
    @rule(place=st.integers(0, 49))
    def a_prompt_fails_from_now_on(self, place: int) -> None:
        self.lost.add(ORDER[place])
        self.run.engines.lost = self.lost

    @rule(number=st.integers(0, 1))
    def an_engine_is_gone(self, number: int) -> None:
        """It serves again soon."""
        engines = self.run.engines
        engine: ScriptedEngine = engines.engines[number]
        engine.live = False

        async def serve_again() -> None:
            await asyncio.sleep(0.001)
            engine.live = True
            engines.notify()

        self.run.loop.begin(serve_again())

    @rule()
    def save(self) -> None:
        self._save()

    @rule()
    def kill(self) -> None:
        """What came after the last checkpoint is undone."""
        self._start()

    @rule()
    def stop_and_resume(self) -> None:
        self.stop.set()
        assert self.run.source.next_batch(self.run.done + 1) is None
        self.run.publish(stopped=True)
        self._save()
        self._start()

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            self.stack.close()


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=30, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
