"""Scores trajectories in worker processes that are killed when a scorer hangs."""

from __future__ import annotations

import logging
import math
import multiprocessing
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import forkserver
from typing import TYPE_CHECKING

from pebble import CONSTS, ProcessExpired, ProcessFuture, ProcessPool

from ctpo_megatron.rewards.math import last_boxed, score_math, warm_up
from ctpo_megatron.signals import children_spared_sigterm

if TYPE_CHECKING:
    from ctpo_megatron.config.schema import RewardConfig
    from ctpo_megatron.data.records import Trajectory

Scorer = Callable[[str, str], float]
"""(final model turn, ground truth) -> reward. Importable by name, since it runs in other processes."""

_START_TIMEOUT_S = 120.0
_SCORERS: dict[str, Scorer] = {"math_verify": score_math}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ScoreReport:
    """What happened in one call of `RewardPool.score`, in trajectories.

    scored: a verdict was reached (those without a box included). no_box: had no complete \\boxed{...}.
    timeouts: the scorer was killed. failures: the scorer raised or its process died twice.
    scored + timeouts + failures is the number of items; timeouts and failures have reward 0.0.
    """

    scored: int
    no_box: int
    timeouts: int
    failures: int


class RewardPool:
    """Worker processes for a scorer, each task with a hard deadline. A context manager.

    One process scores one trajectory at a time, so a hang or crash costs the guilty trajectory only; its process
    is replaced. Workers come from a fork server: they share no threads, devices or signal handlers with the caller.
    A SIGTERM to the whole job passes them by, since the step at hand still needs its rewards.
    """

    def __init__(self, config: RewardConfig, scorer: Scorer | None = None) -> None:
        """Start and warm up `config.workers` processes; `scorer` replaces the one that `config.kind` names.

        Raises RuntimeError when the workers do not come up.
        """
        self._scorer = scorer or _SCORERS[config.kind]
        self._timeout_s = config.timeout_s
        context = multiprocessing.get_context("forkserver")
        # Imported once by the fork server, so that replacing a killed worker costs milliseconds.
        context.set_forkserver_preload(["__main__", "math_verify", __name__])
        with children_spared_sigterm():
            forkserver.ensure_running()
        CONSTS.term_timeout = 0.0  # how long pebble waits for SIGTERM to act before it kills
        self._pool = ProcessPool(max_workers=config.workers, initializer=_start_worker, context=context)
        try:
            for future in [self._pool.schedule(_ready, timeout=_START_TIMEOUT_S) for _ in range(config.workers)]:
                future.result()
        except Exception as error:
            self.close()
            raise RuntimeError(f"the {config.workers} reward workers did not start: {error}") from error

    def score(self, items: Sequence[tuple[Trajectory, str]]) -> ScoreReport:
        """Set `reward` of every (trajectory, ground truth) and count what happened.

        Only `final_text` is scored: tool output and earlier turns never count. Timeouts, exceptions and crashes
        give 0.0 and are logged with prompt and sample; a crash is tried again once, as something else may have killed
        the process. Raises ValueError when a scorer returns a number that is not finite, RuntimeError when the
        workers as a whole are gone.
        """
        futures = [self._schedule(*item) for item in items]
        timeouts = failures = 0
        for (trajectory, answer), future in zip(items, futures, strict=True):
            trajectory.reward = 0.0
            try:
                try:
                    reward = future.result()
                except ProcessExpired:
                    reward = self._schedule(trajectory, answer).result()
                trajectory.reward = _finite(reward, trajectory)
            except FutureTimeoutError:
                timeouts += 1
                log.warning("%s: the scorer was killed after %g s, reward 0", _name(trajectory), self._timeout_s)
            except _NotFinite as error:
                raise ValueError(str(error)) from None
            except BrokenProcessPool as error:
                raise RuntimeError(
                    f"{_name(trajectory)}: no verdict, the reward workers are gone ({error}); was something killed?"
                ) from error
            except Exception as error:
                # A scorer may raise anything, and its process may die: neither may end the run or pass unseen.
                failures += 1
                log.warning("%s: the scorer failed (%r), reward 0", _name(trajectory), error)
        no_box = sum(last_boxed(trajectory.final_text) is None for trajectory, _ in items)
        return ScoreReport(len(items) - timeouts - failures, no_box, timeouts, failures)

    def _schedule(self, trajectory: Trajectory, answer: str) -> ProcessFuture[float]:
        return self._pool.schedule(self._scorer, args=(trajectory.final_text, answer), timeout=self._timeout_s)

    def close(self) -> None:
        """Stop the workers at once; calling it again does nothing."""
        self._pool.stop()
        self._pool.join()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _NotFinite(Exception):
    """A scorer returned NaN or an infinity: a bug in the scorer that must not reach the advantages."""


def _finite(value: float, trajectory: Trajectory) -> float:
    reward = float(value)
    if not math.isfinite(reward):
        raise _NotFinite(f"{_name(trajectory)}: the scorer returned {reward}")
    return reward


def _name(trajectory: Trajectory) -> str:
    return f"prompt {trajectory.prompt_id} sample {trajectory.sample_index}"


def _start_worker() -> None:
    # Also where the fork server was there before and did not hand down that the signal is blocked.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    warm_up()


def _ready() -> None:
    """The task that shows a worker is up."""
