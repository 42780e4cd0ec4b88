"""Users' parts of the test of long contexts, found through `extensions.path`."""

from __future__ import annotations

from typing import Any

from ctpo_megatron.environments import Message


class EndlessUser:
    """Wants more after every turn, until the response budget is used up."""

    async def run(self, episode: Any) -> None:
        while True:
            await episode.generate()
            episode.reply(Message("user", "Go on."))


def even_length_of_last_turn(trajectory: Any, prompt: Any) -> float:
    """1 or 0 as a coin would fall, so that groups have both."""
    return float(sum(trajectory.token_ids) % 2)
