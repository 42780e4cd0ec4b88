"""Traces of engines by vLLM's profiler, for the steps of `run.profile_steps`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from ctpo_megatron.base.run_paths import step_name
from ctpo_megatron.engines.handle import EngineHandle, reason
from ctpo_megatron.engines.timeouts import TRACE_S

log = logging.getLogger(__name__)


class Traces:
    """What some engines record of a step. Without any, nothing is recorded.

    A trace is no reason to end a run: an engine that cannot record, or dies meanwhile, is named in the log.
    """

    def __init__(self, engines: Sequence[EngineHandle] = (), step: int = 0) -> None:
        launches = {each: each.launches for each in engines}
        calls = {each: each.call("start_profile", f"{step_name(step)}_engine_{each.index}") for each in engines}
        self._engines = {each: launches[each] for each in _answered(calls, "begin its trace")}

    def end(self) -> None:
        """Write the traces: `profile/step_%06d_engine_%d_...` of the run directory, on the node of the engine."""
        for engine, launches in self._engines.items():
            if engine.launches != launches:
                log.warning("%s was replaced in a step that is traced; its trace is lost", engine.name)
        same = [engine for engine, launches in self._engines.items() if engine.launches == launches]
        _answered({each: each.call("stop_profile") for each in same}, "write its trace")
        self._engines = {}


def _answered(calls: dict[EngineHandle, Any], what: str) -> list[EngineHandle]:
    """The engines that have answered in time; the others are named in the log."""
    ready, _ = ray.wait(list(calls.values()), num_returns=len(calls), timeout=TRACE_S) if calls else ([], [])
    answered = []
    for engine, reference in calls.items():
        if reference not in ready:
            log.warning("%s did not %s within %g s; log: %s", engine.name, what, TRACE_S, engine.log_path)
            continue
        try:
            ray.get(reference)
            answered.append(engine)
        except RayError as error:
            log.warning("%s did not %s: %s; log: %s", engine.name, what, reason(error), engine.log_path)
    return answered
