"""Experts of whole episodes: prompts that a group shares, turns and tool output all have those that the engine took."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ctpo_megatron.data.records import Prompt
from ctpo_megatron.data.tokens import ROUTER_CHOICES, recorded
from ctpo_megatron.engines import EngineSpec, GroupTask, RolloutEngine, Sampling
from tests.engines.conftest import EXPERTS
from tests.engines.pool_helpers import make_config
from tests.engines.tiny_model import CALL, build_tiny_model
from tests.support.experts import taken
from tests.support.ranks import prefork

pytestmark = pytest.mark.slow  # vLLM takes eight seconds to import


def test_every_token_of_an_episode_has_its_experts(tmp_path: Path) -> None:
    build_tiny_model(tmp_path / "model", favour={CALL: 9.0, "<|im_end|>": 7.0}, **EXPERTS)
    done = prefork().run(play, tmp_path, deadline_s=150)
    log = "".join(path.read_text(encoding="utf-8")[-4000:] for path in tmp_path.glob("*.log"))
    assert done.returncode == 0, done.stderr[-4000:] + log
    trajectories = pickle.loads((tmp_path / "trajectories").read_bytes())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert {trajectory.turns for trajectory in trajectories} >= {1, 3}
    for trajectory in trajectories:
        choices = trajectory.tokens[ROUTER_CHOICES]
        assert choices.dtype == np.uint8 and choices.shape == (len(trajectory), 2, 2)
        assert recorded(choices).tolist() == [True] * (len(trajectory) - 1) + [False]
        assert np.array_equal(np.sort(choices[:-1], axis=2), taken(model, trajectory.token_ids.copy()))


def play(root: Path) -> int:
    torch.set_num_threads(1)
    config = make_config(root / "model", root, sections={"policy": {"router_replay": True}})
    asyncio.run(_play(EngineSpec(config, "unused", root), root))
    return 0


async def _play(spec: EngineSpec, root: Path) -> None:
    engine = RolloutEngine(0, spec)
    await engine.start()
    rows = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [Prompt(f"p{i}", "test", (), "", tuple(row)) for i, row in enumerate(rows)]
    tasks = [GroupTask(prompt, 1, tuple(range(8)), Sampling()) for prompt in prompts]
    trajectories = [trajectory for group in await asyncio.gather(*map(engine.run_group, tasks)) for trajectory in group]
    assert len(trajectories) == 16
    (root / "trajectories").write_bytes(pickle.dumps(trajectories))
