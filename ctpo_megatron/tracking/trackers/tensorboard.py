"""TensorBoard event files below `<run>/tensorboard`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctpo_megatron.base import clock
from ctpo_megatron.base.run_paths import RunPaths

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.event_file_writer import EventFileWriter


class TensorBoard:
    """Event files of the RL steps; event files of the supervised stage in the subfolder `sft`."""

    identity = None

    def __init__(self, run_dir: Path, config: Mapping[str, Any], identity: str | None = None) -> None:
        self._folder = RunPaths(run_dir).tensorboard
        self._steps = _writer(self._folder)
        self._sft: EventFileWriter | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write and flush the metrics of one step."""
        writer = self._sft_writer() if any(name.startswith("sft/") for name in metrics) else self._steps
        writer.add_event(_scalar_event(step, metrics))
        writer.flush()

    def rewind(self, step: int) -> None:
        """Make TensorBoard discard earlier values of the steps after `step`."""
        self._steps.add_event(_purge_event(step + 1))

    def close(self) -> None:
        """Flush and close the files."""
        for writer in (self._steps, self._sft):
            if writer is not None:
                writer.close()

    def _sft_writer(self) -> EventFileWriter:
        if self._sft is None:
            self._sft = _writer(self._folder / "sft")
            self._sft.add_event(_purge_event(1))  # that stage always starts from the beginning
        return self._sft


def _writer(folder: Path) -> EventFileWriter:
    """TensorBoard's own writer: it imports in a fraction of a second and does not pull in torch."""
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    return EventFileWriter(str(folder))


def _scalar_event(step: int, values: Mapping[str, float]) -> Event:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
    return Event(wall_time=clock.now(), step=step, summary=Summary(value=scalars))


def _purge_event(step: int) -> Event:
    """An event that makes TensorBoard discard earlier values from `step` on."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    return Event(wall_time=clock.now(), step=step, session_log=SessionLog(status=SessionLog.START))
