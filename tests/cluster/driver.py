"""A trainer's rank zero in a process of its own, as far as the fleet is concerned; a test tells it what to do.

Ray reads its token and its settings when it is imported, so the driver of a cluster needs a fresh process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Refused(Exception):
    """What the driver's fleet raised."""


class Driver:
    """The test's end: `call` waits for the answer, `begin` does not."""

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        command = [sys.executable, "-m", "tests.cluster.driver"]
        self._log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
            )

    def call(self, name: str, **arguments: Any) -> Any:
        """What the command returns. Raises Refused with what it raised."""
        return self.begin(name, **arguments)()

    def begin(self, name: str, **arguments: Any) -> Callable[[], Any]:
        """Start a command; call the result to wait for its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, arguments]) + "\n")
        self.process.stdin.flush()
        return self._answer

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"the driver ended with {self.process.wait()}:\n{self._log.read_text()[-3000:]}")
        answer = json.loads(line)
        if "refused" in answer:
            raise Refused(answer["refused"])
        return answer["result"]

    def close(self) -> None:
        """End it; the fleet is closed first."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        timer = threading.Timer(60, self.process.kill)
        timer.start()
        self.process.wait()
        timer.cancel()


class _Served:
    """The driver's end: the fleet and what is asked of it."""

    stage: Any = None

    def refusal(self, model: str, root: str, sandbox_url: str | None = "unused", **rollout: Any) -> str:
        """Why a fleet of this configuration does not start."""
        from ctpo_megatron.base.event_loop import EventLoop
        from ctpo_megatron.engines import EngineError, EnginePool
        from tests.engines.pool_helpers import check_of, make_config

        config = make_config(Path(model), Path(root), **rollout)
        with EventLoop() as loop, EnginePool(config, sandbox_url, loop, check=check_of(config)) as fleet:
            try:
                fleet.start()
                fleet.wait_ready()
            except EngineError as error:
                return str(error)
        raise AssertionError("the fleet started")

    def start(self, root: str, **options: Any) -> float:
        """Start the fleet of a tiny model; returns the seconds until it serves."""
        from tests.engines.pool_helpers import Stage

        started = time.monotonic()
        self.stage = Stage(Path(root), **options)
        self.stage.fleet.wait_ready()
        return time.monotonic() - started

    def engines(self) -> list[str]:
        """Their names."""
        return [engine.name for engine in self.stage.fleet.engines]

    def sync(self, scale: float) -> float:
        """Send other weights; returns the seconds it took."""
        started = time.monotonic()
        self.stage.sync(scale)
        return time.monotonic() - started

    def generate(self, prompts: int, step: int) -> dict[str, Any]:
        """Play groups; what became of them, and how far their log-probs are from the model's."""
        from tests.engines.pool_helpers import largest_log_prob_error, trajectories, versions

        started = time.monotonic()
        groups = self.stage.generate(self.stage.prompts(prompts), step=step)
        return {
            "seconds": time.monotonic() - started,
            "groups": len(groups),
            "versions": sorted(versions(groups)),
            "version": self.stage.version,
            "error": largest_log_prob_error(self.stage.model, groups),
            "calls": [call.status for trajectory in trajectories(groups) for call in trajectory.tool_calls],
            "stats": self.stage.fleet.stats(),
        }

    def close(self) -> None:
        """Close the fleet."""
        if self.stage is not None:
            self.stage.close()


def main() -> None:
    served, answers = _Served(), os.dup(1)
    os.dup2(2, 1)  # whatever prints goes to the log
    with os.fdopen(answers, "w") as output:
        try:
            for line in sys.stdin:
                name, arguments = json.loads(line)
                try:
                    answer = {"result": getattr(served, name)(**arguments)}
                except Exception as error:  # the test raises it again
                    answer = {"refused": f"{type(error).__name__}: {error}"}
                output.write(json.dumps(answer) + "\n")
                output.flush()
        finally:
            served.close()


if __name__ == "__main__":
    main()
