"""What the fleet tests share: a small configuration, with a scripted tool in place of the sandbox, and a fleet."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from ctpo_megatron.base.event_loop import EventLoop, Work
from ctpo_megatron.checks import NodeComparison
from ctpo_megatron.config.schema import Config
from ctpo_megatron.data.records import Prompt
from ctpo_megatron.data.trajectory import Group, Trajectory
from ctpo_megatron.engines import EngineHandle, EnginePool, GroupFailed, GroupTask, Sampling
from ctpo_megatron.engines.weights import TransportSettings
from ctpo_megatron.rollouts import GroupSampler
from tests.engines.tiny_model import CALL, build_tiny_model
from tests.weights.sides import Sender

MAX_RESPONSE, MAX_TURN = 150, 30


HERE = Path(__file__).parent


def make_config(path: Path, root: Path, **rollout: Any) -> Config:
    """Of a fleet with the model at `path`; the file `root / "flag"` tells the scripted tool what to do.

    rollout: its settings; `sections`: further ones of the configuration.
    """
    sections = rollout.pop("sections", {})
    engine = {"max_model_len": 320, "max_num_seqs": 64, "kv_cache_mb": 32, "block_size": 32}
    settings = {
        "max_turns": 3,
        "max_turn_tokens": MAX_TURN,
        "max_response_tokens": MAX_RESPONSE,
        "max_group_retries": 2,
        "start_timeout_s": 240,
        "group_timeout_s": 120,
        "engine": engine,
        "tools": [{"name": "user_parts:ScriptedPython", "arguments": {"flag": str(root / "flag")}}],
    }
    return Config.model_validate(
        {
            "run": {"name": "test", "root": str(root), "steps": 1, "seed": 7},
            "model": {"path": str(path)},
            "data": {"train": ["unused"]},
            "rollout": settings | rollout,
            "extensions": {"path": [str(HERE)]},
        }
        | sections
    )


def check_of(config: Config) -> NodeComparison | None:
    """What nodes of the Ray cluster have to pass that this process joins, as in a run; None where Ray is private."""
    return NodeComparison.of(config) if os.environ.get("RAY_ADDRESS") else None


class Stage:
    """A running fleet with what the tests compare it to. `flag` tells its scripted tool what to do.

    model: settings of the tiny model. rollout: settings of the fleet. sandbox_url: None: of the engine's own node.
    """

    def __init__(
        self, root: Path, model: dict[str, Any] | None = None, *, sandbox_url: str | None = "unused", **rollout: Any
    ) -> None:
        self.path, self.flag = root / "model", root / "flag"
        favour = {CALL: 9.0, "<|im_end|>": 7.0}
        self.tokenizer, self.model = build_tiny_model(self.path, favour=favour, **(model or {}))
        self.version = 0
        self.config = make_config(self.path, root, **rollout)
        self.loop = EventLoop()
        self.fleet = EnginePool(self.config, sandbox_url, self.loop, check=check_of(self.config))
        self.sampler = GroupSampler(self.fleet, self.config.rollout)
        self.fleet.start()
        self._sender: Sender | None = None

    def close(self) -> None:
        self.fleet.close()
        if self._sender is not None:
            self._sender.close()

    @property
    def sender(self) -> Sender:
        """Sends by the transport of the fleet's configuration."""
        if self._sender is None:
            settings = TransportSettings.of(self.config.rollout.weights)
            settings = replace(settings, bucket_bytes=64 << 10)
            self._sender = Sender(self.state(), self.fleet.wait_ready(), settings, self.fleet)
        return self._sender

    def prompts(self, count: int, length: int = 40) -> list[Prompt]:
        generator = torch.Generator().manual_seed(count)
        rows = torch.randint(0, 256, (count, length), generator=generator).tolist()
        return [Prompt(f"p{i}", "test", (), "", tuple(row)) for i, row in enumerate(rows)]

    def sync(self, scale: float) -> None:
        """Move every weight a little, deterministically, and hand the result to the engines."""
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
        self.version += 1
        self.send(self.state(), self.version)

    def state(self) -> dict[str, torch.Tensor]:
        """All weights, under the names of a checkpoint."""
        self.model.save_pretrained(self.path.parent / "updated")
        return load_file(self.path.parent / "updated" / "model.safetensors")

    def send(self, state: dict[str, torch.Tensor], version: int) -> None:
        """Returns when all engines have the weights."""
        self.begin_send(state, version)
        self.fleet.finish_update()

    def begin_send(self, state: dict[str, torch.Tensor], version: int) -> None:
        """Returns when the weights can be changed."""
        self.sender.tensors = state
        self.fleet.send(self.sender, version)

    def generate(self, prompts: Sequence[Prompt], step: int = 0, samples: int = 4, **sampling: Any) -> list[Group]:
        self.fleet.wait_ready()
        return self.loop.call(sampled(self.sampler, prompts, step, samples, urgent=True, **sampling))

    def begin(self, prompts: Sequence[Prompt], step: int = 0, samples: int = 4, **settings: Any) -> Work[list[Group]]:
        """Sample groups in the background."""
        return self.loop.begin(sampled(self.sampler, prompts, step, samples, **settings))


async def sampled(
    sampler: GroupSampler, prompts: Sequence[Prompt], step: int, samples: int, *, urgent: bool = False, **sampling: Any
) -> list[Group]:
    """Complete groups in the order of their prompts, without quarantined ones."""
    shape = step, tuple(range(samples)), Sampling(**sampling)
    draws = [[each.id for each in prompts[:place]].count(prompt.id) for place, prompt in enumerate(prompts)]

    async def one(prompt: Prompt, draw: int) -> Group | None:
        if sampler.is_quarantined(prompt):
            return None
        try:
            return Group(prompt, await sampler.sample(GroupTask(prompt, *shape, occurrence=draw), urgent=urgent))
        except GroupFailed as error:
            sampler.lose(prompt, step, error)
            return None

    return [group for group in await asyncio.gather(*map(one, prompts, draws)) if group is not None]


def trajectories(groups: Sequence[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


def tokens(groups: Sequence[Group]) -> list[list[int]]:
    return [trajectory.token_ids for trajectory in trajectories(groups)]


def largest_log_prob_error(
    model: PreTrainedModel | dict[int, PreTrainedModel], groups: Sequence[Group], temperature: float = 1.0
) -> float:
    """Of all sampled tokens. model: by version: a token is compared with the one that it is stamped with."""
    models = model if isinstance(model, dict) else dict.fromkeys(versions(groups), model)
    worst = 0.0
    for sequence in (each.tokens[part] for each in trajectories(groups) for part in each.sequences):
        ids = torch.tensor(sequence["token_ids"].tolist())
        have = torch.tensor(sequence["rollout_log_probs"][1:].tolist())
        for version, of_version in models.items():
            with torch.no_grad():
                log_probs = (of_version(ids[None]).logits[0, :-1] / temperature).log_softmax(-1)
            want = log_probs.gather(1, ids[1:, None])[:, 0]
            mine = torch.tensor((sequence["weight_version"][1:] == version).tolist())
            worst = max([worst, *(want - have)[mine].abs().tolist()])
    return worst


def versions(groups: Sequence[Group]) -> set[int]:
    """The weights that the model tokens were sampled with."""
    return {
        version
        for trajectory in trajectories(groups)
        for version, by_model in zip(trajectory.weight_version, trajectory.response_mask, strict=True)
        if by_model
    }


def process_of(engine: EngineHandle) -> psutil.Process:
    """The actor of an engine that is up."""
    return psutil.Process(ray.get(engine.call("__ray_call__", lambda _: os.getpid())))
