"""The sandbox behind a slow network: each call first waits for a log-normal time, as a tool of the user's own."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from random import Random
from typing import Any

from ctpo_megatron.config import SandboxConfig
from ctpo_megatron.environments import PythonTool, ToolResult

SHORTEST_S, LONGEST_S = 0.5, 5.0
_MEDIAN = math.sqrt(SHORTEST_S * LONGEST_S)
_SIGMA = math.log(LONGEST_S / _MEDIAN) / 1.96  # 95 % of the draws lie between shortest and longest


def latency_s(code: str, number: int) -> float:
    """Of the call number `number` of this program: the same in every run, between `SHORTEST_S` and `LONGEST_S`."""
    drawn = Random(f"{number}/{code}").lognormvariate(math.log(_MEDIAN), _SIGMA)
    return min(max(drawn, SHORTEST_S), LONGEST_S)


class SlowPython:
    """`python` on the server at `url`; asleep while it waits, so that a wait costs no CPU time."""

    schema = PythonTool.schema

    def __init__(self, url: str) -> None:
        self._tool = PythonTool(SandboxConfig(url=url), url, engines=1)
        self._calls: Counter[str] = Counter()

    async def __call__(self, arguments: dict[str, Any]) -> ToolResult:
        code = arguments["code"]
        self._calls[code] += 1
        await asyncio.sleep(latency_s(code, self._calls[code]))
        return await self._tool(arguments)
