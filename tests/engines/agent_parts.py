"""An agent with OpenAI's client, and an environment that lets it or the built-in one run an episode."""

from __future__ import annotations

from typing import Any

import openai

from ctpo_megatron.config import EndpointConfig, Extension
from ctpo_megatron.environments import AgentTask, EndpointEnvironment, Episode, ToolEnvironment


class Solver:
    """Calls tools until it answers; `helpers` conversations of its own come before."""

    def __init__(self) -> None:
        self.client = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="of the task", max_retries=0)

    async def __call__(self, task: AgentTask) -> str | None:
        model = self.client.with_options(base_url=task.base_url, api_key=task.api_key)

        async def ask(messages: list[Any]) -> Any:
            done = await model.chat.completions.create(model=task.model, messages=messages, tools=task.tools)  # type: ignore[call-overload]
            return done.choices[0]

        if task.row.get("helper"):
            await ask([{"role": "user", "content": "Help."}])
        messages: list[Any] = [*task.messages]
        while True:
            choice = await ask(messages)
            messages.append(choice.message)
            if choice.finish_reason != "tool_calls":
                return None
            for call in choice.message.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": await task.call_tool(call)})


class Both:
    """The agent for prompts of "agent", else the built-in environment."""

    def __init__(self) -> None:
        agent = Extension(name="agent_parts:Solver")
        self._tools, self._agent = ToolEnvironment(), EndpointEnvironment(EndpointConfig(agent=agent), [])

    async def run(self, episode: Episode) -> None:
        if episode.prompt.data_source != "agent":
            return await self._tools.run(episode)
        await self._agent.run(episode)
