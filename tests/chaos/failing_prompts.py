"""The built-in environment, but for some training prompts whose tool is never there."""

from __future__ import annotations

from ctpo_megatron.environments import Episode, ToolEnvironment, ToolUnavailable


def always_fails(prompt_id: str) -> bool:
    """One training prompt in 64; ids are `toolmath/train/<number>`."""
    _, split, number = prompt_id.split("/")
    return split == "train" and int(number) % 64 == 7


class FailingPrompts(ToolEnvironment):
    async def run(self, episode: Episode) -> None:
        if always_fails(episode.prompt.id):
            raise ToolUnavailable("this prompt always fails")
        await super().run(episode)
