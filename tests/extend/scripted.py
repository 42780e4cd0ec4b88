"""What the tests of the examples share: their configurations, and a scripted model."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from ctpo_megatron.base.extensions import activate
from ctpo_megatron.config import Config, load_config
from ctpo_megatron.data.records import Prompt
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.environments import Episode, EpisodeLimits, Message, ModelTurn, make_environment, make_toolbox, play
from tests.end_to_end.small_run import Ctpo
from tests.support import children

ROOT = Path(__file__).resolve().parents[2]
STOP = 0


def project(name: str, *overrides: str) -> Config:
    """The configuration of a folder of examples, with its modules ready to be imported."""
    config = load_config(ROOT / "examples" / name / f"{name}.yaml", overrides)
    activate(config.extensions.path or ())
    return config


def trained(folder: Path, files: Sequence[Path], *overrides: str, deadline_s: float) -> tuple[Path, str]:
    """The directory of the example's run, which is named as its folder, and what was printed."""
    (folder / "examples").symlink_to(ROOT / "examples")
    command = [sys.executable, "-m", "ctpo_megatron.train", *map(str, files), "tracking.live=plain", *overrides]
    done = children.run(command, directory=folder, environment=Ctpo(folder).environment, deadline_s=deadline_s)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return folder / "runs" / files[-1].stem, done.stdout + done.stderr


class Codec:
    """One character a token; a message is its role and its content between brackets."""

    stop_ids = frozenset({STOP})

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def encode(self, messages: Sequence[Message], *, end_turn: bool = False) -> list[int]:
        text = "".join(f"[{message.role}: {message.content}]" for message in messages)
        return [*([STOP] if end_turn else []), *map(ord, text)]


def played(config: Config, *turns: str, answer: str = "") -> tuple[str, Trajectory]:
    """The episode in which a model says `turns`: its text after the prompt, and its record."""
    codec, said = Codec(), iter(turns)

    async def generate(
        token_ids: Sequence[int], *, max_tokens: int, seed: int, start: int = 0, stop: Sequence[str] = ()
    ) -> ModelTurn:
        ids = [*map(ord, next(said)), STOP][:max_tokens]
        return ModelTurn(ids, [-0.5] * len(ids), [1] * len(ids))

    async def play_it() -> Trajectory:
        episode = Episode(
            Prompt("p", "source", (), answer, (ord("?"),)),
            Trajectory("p", 0, 7),
            engine=generate,
            codec=codec,
            tools=make_toolbox(config.rollout, config.sandbox, "http://127.0.0.1:9", engines=1, nodes=1),
            limits=EpisodeLimits(config.rollout.max_turns, None, 4000, 4096),
        )
        return await play(make_environment(config.rollout, config.data), episode)

    trajectory = asyncio.run(play_it())
    return codec.decode(trajectory.token_ids[1:]).replace(chr(STOP), "|"), trajectory
