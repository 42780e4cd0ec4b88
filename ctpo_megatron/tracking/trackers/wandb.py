"""Weights & Biases: one W&B run for one run directory, also when the run is resumed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class WeightsAndBiases:
    """Logs into a W&B run. The key is read from WANDB_API_KEY (or ~/.netrc), never from the configuration.

    Every chart uses `step`, which is logged like a metric: a resumed run repeats steps, which W&B's own counter
    refuses. options: further arguments of `wandb.init`, e.g. entity, group, tags, mode ("offline": files below
    `<run>/wandb`, for `wandb sync`).
    """

    def __init__(
        self,
        run_dir: Path,
        config: Mapping[str, Any],
        identity: str | None = None,
        project: str = "ctpo",
        **options: Any,
    ) -> None:
        import wandb

        self._run = wandb.init(
            **{"name": config["run"]["name"], **options},
            project=project,
            dir=str(run_dir),
            config=dict(config),
            id=identity,
            resume="allow",
            settings=wandb.Settings(console="off", disable_code=True, quiet=True),
        )
        self._run.define_metric("*", step_metric="step")

    @property
    def identity(self) -> str:
        """The id of the W&B run."""
        return str(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of one step."""
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        """Wait until W&B has received everything."""
        self._run.finish()
