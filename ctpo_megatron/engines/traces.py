"""Traces of engines by vLLM's profiler: an engine that cannot trace is named in the log, and ends no run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from ctpo_megatron.base.run_paths import step_name
from ctpo_megatron.engines.handle import EngineHandle

_TRACE_S = 120.0
"""For engines to begin a trace, or to write it."""

log = logging.getLogger(__name__)


class EngineTraces:
    """What the engines of a pool record between `begin` and `end`, on their event loop."""

    def __init__(self) -> None:
        self._traced: dict[EngineHandle, int] = {}

    async def begin(self, engines: Sequence[EngineHandle], step: int) -> None:
        """Have the profilers of these engines record from now on."""
        self._traced = await _asked(engines, "begin its trace", "start_profile", f"{step_name(step)}_engine_")

    async def end(self) -> None:
        """Have engines write what was recorded. One that was replaced meanwhile has lost its trace."""
        traced, self._traced = self._traced, {}
        same = [engine for engine, launches in traced.items() if engine.launches == launches]
        for engine in traced.keys() - same:
            log.warning("%s was replaced in a step that is traced; its trace is lost", engine.name)
        await _asked(same, "write its trace", "stop_profile")


async def _asked(engines: Sequence[EngineHandle], what: str, method: str, *prefixes: str) -> dict[EngineHandle, int]:
    """Call a method of engines, with `prefixes` before their numbers; returns the launches of those that answer."""
    calls = [each.ask(what, _TRACE_S, method, *(f"{name}{each.index}" for name in prefixes)) for each in engines]
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            log.warning("%s", result)
    pairs = zip(engines, results, strict=True)
    return {engine: engine.launches for engine, result in pairs if not isinstance(result, BaseException)}
