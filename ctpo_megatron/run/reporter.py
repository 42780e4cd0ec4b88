"""What a run writes for people while it goes: metrics, display, dumps of trajectories, time."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from ctpo_megatron.base.run_paths import EVALUATION, SFT_METRICS, TRAJECTORIES, RunPaths
from ctpo_megatron.config import Config, engine_count
from ctpo_megatron.data import Batch, Group
from ctpo_megatron.environments import decoder
from ctpo_megatron.policy import TrainResult, device_name, product_precision
from ctpo_megatron.report import (
    FALLEN,
    Decline,
    conversation_uses,
    decline_of,
    first_batch_warnings,
    print_summary,
    write_report,
)
from ctpo_megatron.tracking import (
    DUMP_FAILURES,
    Decode,
    Display,
    DumpWriter,
    Heartbeat,
    MetricsWriter,
    Phases,
    PositionsWriter,
    Progress,
    TrainLog,
    discard_dumps,
    groups_to_dump,
    open_trackers,
    peak_flops,
    phase_peaks,
    read_metrics,
    sft_metrics,
    throughput_metrics,
    write_trajectories,
)

log = logging.getLogger(__name__)

_HEARTBEAT_S = 5.0  # between two writes of the heartbeat
_SAMPLE = 8
"""Prompts of a step whose trajectories `tracking.trajectories: sample` writes."""


class Reporter:
    """Metrics, display, dumps and report of a run, and the time of its phases and stages. Lives on rank zero."""

    def __init__(self, config: Config, directory: Path, decode: Decode, *, trainers: int, peak: float | None) -> None:
        """decode: token ids to text, special tokens kept. peak: FLOP/s of one device; None where not known."""
        self.phases = Phases(directory)
        self.progress = self.phases.progress
        self._config, self._directory, self._decode = config.tracking, directory, decode
        sampling = config.rollout.replay is None  # reading a file is no sampling
        engines = engine_count(config) * config.rollout.engine.tensor_parallel_size if sampling else 0
        self._peaks = phase_peaks(config.tracking.peak_flops or peak, trainers=trainers, engines=engines)
        self._exit = ExitStack()
        self._trainers = trainers
        title = f"{config.run.name}, {config.objective.preset}"
        self._trackers = self._exit.enter_context(open_trackers(config, directory))
        self._metrics = self._exit.enter_context(MetricsWriter(directory, self._trackers))
        self._positions = PositionsWriter(directory)
        train_log = self._exit.enter_context(TrainLog(directory))
        display = Display(config.tracking.live, config.run.steps, title=title, record=train_log.shown)
        self._display = self._exit.enter_context(display)
        self._dumps = self._exit.enter_context(closing(DumpWriter()))
        self._sft: MetricsWriter | None = None
        self._prompts, self._decline = config.rollout.prompts_per_step, Decline(config.rollout.prompts_per_step)
        self._tools, self._is_first_batch = config.rollout.can_call_tools, True
        self.note(f"writing to {directory}")

    @classmethod
    def of(cls, config: Config, directory: Path, trainers: int) -> Self:
        """trainers: ranks of the trainer."""
        peak = peak_flops(device_name(), product_precision(config.policy.dtype))
        return cls(config, directory, decoder(config.model.path), trainers=trainers, peak=peak)

    def __enter__(self) -> Self:
        self._exit.enter_context(_heartbeat(self._directory, self.progress, self._trainers))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._exit.__exit__(kind, error, at)

    @property
    def latest(self) -> Mapping[str, Any]:
        """The record of the latest step, `step` included; the record of step -1 before the first."""
        return self._metrics.latest

    def note(self, text: str) -> None:
        """Show a line that stays."""
        self._display.note(text)

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time a part of the current step."""
        return self.phases.phase(name)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Show and time one stage of the run."""
        self._display.stage(name)
        self.phases.lap()
        with self.phases.stage(name):
            yield

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics to the line of a step, with the time since the last call."""
        former = self._metrics.latest if self._metrics.latest["step"] == step else {}
        self.progress.step = step
        self.log_evaluation(step, self._with_speed(metrics, former))

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add an evaluation to the line of its step, the latest, and show it; the times of the line stay."""
        self._metrics.log(step, metrics)
        self._warn_of_decline(step, metrics)
        self._display.evaluation(step, metrics, self._first_evaluation)

    @property
    def _first_evaluation(self) -> dict[str, float]:
        """The first value of every `val/` metric of the run, also before a resume."""
        first: dict[str, float] = {}
        for record in read_metrics(self._directory):
            first |= {name: value for name, value in record.items() if name.startswith("val/") and name not in first}
        return first

    def log_step(self, step: int, batch: Batch, result: TrainResult) -> None:
        """Write and show a finished RL step; dump its trajectories with what the diagnostics add by index."""
        with self.phase("dump"):
            self._dumps.wait()  # a slow disk slows training down instead of filling memory
        behind = {"time/dump_behind": self._dumps.take_cpu_s(), **self._dumps_lost()}
        record = self._with_speed({**batch.metrics, **result.metrics, **behind}, {"time/step": 0.0})
        self._metrics.log(step, record)
        self._warn_of_decline(step, record)
        if (found := result.positions) is not None:
            parts = {"first": found.first, "last": found.last} if result.dumped else {}
            self._positions.log(step, {of: stats.record() for of, stats in {"all": found.whole, **parts}.items()})
        self.progress.step = step
        self._display.step(step, record)
        if self._config.trajectories != "none":  # last: the thread that writes it would slow down what is above
            most = _SAMPLE if self._config.trajectories == "sample" else None
            self._dump(step, *groups_to_dump(batch, result.diagnostics, most))
        if self._is_first_batch:
            self._is_first_batch = False
            self._warn(step, record)

    def _warn(self, step: int, record: Mapping[str, float]) -> None:
        """Say what keeps this batch from teaching anything."""
        dump = str(RunPaths(self._directory).dump(step))
        written = self._config.trajectories != "none"
        where = dump if written else "the trajectories, which tracking.trajectories: all writes"
        for text in first_batch_warnings(record, where, tools=self._tools):
            log.warning("warning: step %d: %s", step, text)

    def _warn_of_decline(self, step: int, metrics: Mapping[str, float]) -> None:
        for text in self._decline.add(metrics):
            log.warning("warning: step %d: %s, by more than noise explains. %s", step, text, FALLEN)

    def dump_evaluation(self, step: int, groups: Sequence[Group]) -> None:
        """Keep the answers to held-out prompts."""
        self._dump(step, groups, {}, EVALUATION)

    def _dump(
        self, step: int, groups: Sequence[Group], extra: Mapping[int, Mapping[str, Any]], folder: str = TRAJECTORIES
    ) -> None:
        write = partial(write_trajectories, self._directory, step, groups, self._decode, folder, extra)
        with self.phase("dump"):
            self._dumps.put(f"the dump of step {step} in {folder}", write)

    def flush(self) -> None:
        """Return when all dumps are on disk that can be written; others are counted in the latest line."""
        with self.phase("dump"):
            self._dumps.flush()
        if (latest := self.latest)["step"] >= 0 and (lost := self._dumps_lost()):
            self._metrics.log(latest["step"], {name: count + latest.get(name, 0.0) for name, count in lost.items()})

    def _dumps_lost(self) -> dict[str, float]:
        lost = self._dumps.take_failures()
        return {DUMP_FAILURES: float(lost)} if lost else {}

    def begin_sft(self, done: int) -> None:
        """Set aside what an earlier attempt wrote of the supervised steps beyond `done`."""
        self._sft = self._exit.enter_context(MetricsWriter(self._directory, self._trackers, SFT_METRICS))
        self._sft.truncate_after(done)

    def log_sft(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Write and show one supervised step; `begin_sft` comes before the first."""
        assert self._sft is not None, "begin_sft comes before log_sft"
        metrics = {**metrics, **self.phases.metrics()}
        record = sft_metrics(metrics | throughput_metrics(metrics, self._peaks))
        self._sft.log(step, record)
        self.progress.step = step
        self._display.progress(step, total, record)
        if step == total and "sft/epoch" in record:
            self.note(f"[sft] conversations: {conversation_uses(record['sft/epoch'])}")

    def discard(self, after: int, record: Mapping[str, Any] | None) -> None:
        """Set aside dumps and metrics beyond step `after`; see `MetricsWriter.truncate_after`."""
        self.flush()
        discard_dumps(self._directory, after)
        self._metrics.truncate_after(after, record)
        self._positions.truncate_after(after)
        self._decline = decline_of(read_metrics(self._directory), self._prompts)
        self.progress.step = max(after, 0)

    def finish(self) -> None:
        """Write the report and print the summary."""
        self.flush()
        with self.stage("report"):
            if self._config.report:
                write_report(self._directory)
        self._display.end(partial(print_summary, self._directory))

    def _with_speed(self, metrics: Mapping[str, float], former: Mapping[str, Any]) -> dict[str, float]:
        """The metrics, the time since the last call, and the rates that follow.

        former: the present metrics of that line; times are added to its own, so that `time/step` covers the whole step.
        """
        times, whole = self.phases.metrics(), self.phases.lap()
        times |= {"time/step": whole.wall, "time/step_cpu": whole.cpu}
        if "time/step" not in former:  # before the first step
            del times["time/step"], times["time/step_cpu"]
        found = {**metrics, **{name: seconds + (former.get(name) or 0.0) for name, seconds in times.items()}}
        tokens = ({**former} | found).get("tokens/total")
        if "time/step" in found and tokens:
            found["tokens/per_second"] = tokens / found["time/step"]
        return found | throughput_metrics(found, self._peaks)


@contextmanager
def _heartbeat(directory: Path, progress: Progress, ranks: int) -> Iterator[None]:
    """Within, a thread writes `heartbeat.json` every few seconds; afterwards the file says how the run ended."""
    over = threading.Event()

    def write(state: Literal["running", "ended", "failed"]) -> None:
        now, process, host = time.time(), os.getpid(), socket.gethostname()
        moved = now - (progress.idle_s if state == "running" else 0.0)
        with suppress(OSError):  # the metrics tell of a disk that is full or gone
            Heartbeat(state, progress.step, progress.phase, now, moved, ranks, process, host).write(directory)

    def beat() -> None:
        write("running")
        while not over.wait(_HEARTBEAT_S):
            write("running")

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    end: Literal["ended", "failed"] = "ended"
    try:
        yield
    except Exception:
        end = "failed"
        raise
    finally:
        over.set()
        thread.join()
        write(end)
