"""The built-in environment: the model calls tools until it answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ctpo_megatron.environments.episode import Episode


class ToolEnvironment:
    """Ends with "answer" after a turn without a tool call, with "length" when a turn or tool output does not fit.

    A tool call in the last turn is not run: the episode ends with "max_turns".
    """

    async def run(self, episode: Episode) -> None:
        """See Environment."""
        while True:
            turn = await episode.generate()
            calls = episode.mentions_call(turn)
            if not turn.complete:
                return episode.finish("" if calls else turn.text, "length")
            if not calls:
                return episode.finish(turn.text)
            episode.reply(*await episode.call_tools(turn))
