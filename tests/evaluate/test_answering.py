"""Answers that come one by one, to a scorer that awaits as many as it is given."""

from __future__ import annotations

import asyncio
from pathlib import Path

from ctpo_megatron.config import RewardConfig
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.evaluate.answering import ScoredAnswers
from ctpo_megatron.evaluate.samples import Sample
from ctpo_megatron.evaluate.store import SampleStore
from ctpo_megatron.rewards import RewardPool
from tests.support.deadlines import scaled

JUDGE = """
import asyncio

arrived, all_here = 0, asyncio.Event()

async def judge(trajectory, prompt):
    global arrived
    arrived += 1
    if arrived == 3:
        all_here.set()
    await all_here.wait()
    return float(trajectory.sample_index)
"""


def answered(index: int) -> Trajectory:
    trajectory = Trajectory("p", index, seed=index)
    trajectory.append_context([1, 2], turn=0)
    trajectory.append_model([3 + index], [-0.5], [0], turn=1)
    trajectory.finish_reason = "answer"
    return trajectory


def test_answers_that_come_soon_after_another_are_awaited_together(tmp_path: Path) -> None:
    (tmp_path / "remote_judge.py").write_text(JUDGE, encoding="utf-8")
    config = RewardConfig.model_validate({"function": "remote_judge:judge", "workers": 1, "timeout_s": scaled(20.0)})
    kept: list[Sample] = []
    with RewardPool(config, [str(tmp_path)]) as pool:
        store = SampleStore(tmp_path / "samples", {})
        answers = ScoredAnswers(pool, store, lambda ids: " ".join(map(str, ids)), kept.extend)

        async def answer() -> None:
            for index in range(3):
                await asyncio.sleep(0.01)
                answers.take(Prompt("p", "test", (), "", (1, 2)), answered(index))
            await answers.kept()

        asyncio.run(answer())
        assert [(sample.index, sample.score) for sample in kept] == [(0, 0.0), (1, 1.0), (2, 2.0)]
        assert store.complete("p", 3)
        store.close()
