"""TensorBoard event files below `<run>/tensorboard`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctpo_megatron.base.run_paths import RunPaths

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard:
    """Event files of the RL steps; event files of the supervised stage in the subfolder `sft`."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any], identity: str | None = None) -> None:
        self._folder = RunPaths(run_dir).tensorboard
        self._writers: dict[str, SummaryWriter] = {}
        # The first step whose earlier values TensorBoard discards; the supervised stage always starts from 1.
        self._purge: dict[str, int] = {"sft": 1}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write and flush the metrics of one step."""
        from torch.utils.tensorboard import SummaryWriter

        stage = "sft" if any(name.startswith("sft/") for name in metrics) else ""
        if stage not in self._writers:
            self._writers[stage] = SummaryWriter(self._folder / stage, purge_step=self._purge.get(stage))
        for name, value in metrics.items():
            self._writers[stage].add_scalar(name, value, step, time.time())
        self._writers[stage].flush()

    def rewind(self, step: int) -> None:
        """Make TensorBoard discard earlier values of the steps after `step`."""
        self._purge[""] = step + 1
        if writer := self._writers.pop("", None):
            writer.close()

    def close(self) -> None:
        """Flush and close the files."""
        for writer in self._writers.values():
            writer.close()
