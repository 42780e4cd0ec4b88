"""MLflow: one MLflow run for one run directory, also when the run is resumed."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ctpo_megatron.config import flattened

_AT_ONCE = 100  # limit of parameters in one request; of metrics it is 1000
_LONGEST_PARAMETER = 500


class Mlflow:
    """Logs into an MLflow run. Users and passwords come from MLFLOW_TRACKING_USERNAME, _PASSWORD or _TOKEN.

    tracking_uri: a server, or e.g. sqlite:///runs/mlflow.db; without it MLFLOW_TRACKING_URI, else the file `mlflow.db`
    next to the run directory. Characters that MLflow does not allow in names (`@`) become `_`.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Mapping[str, Any],
        identity: str | None = None,
        experiment: str = "ctpo",
        tracking_uri: str | None = None,
    ) -> None:
        from mlflow import MlflowClient

        beside = f"sqlite:///{run_dir.resolve().parent / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or beside)
        if identity is not None:
            self.identity = identity
            self._client.update_run(identity, status="RUNNING")
        else:
            found = self._client.get_experiment_by_name(experiment)
            number = found.experiment_id if found else self._client.create_experiment(experiment)
            self.identity = self._client.create_run(number, run_name=config["run"]["name"]).info.run_id
            self._log_parameters(config)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of one step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(
            self.identity, metrics=[Metric(_allowed(name), value, now, step) for name, value in metrics.items()]
        )

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self.identity)

    def _log_parameters(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        values = [Param(_allowed(key), str(value)[:_LONGEST_PARAMETER]) for key, value in flattened(config)]
        for start in range(0, len(values), _AT_ONCE):
            self._client.log_batch(self.identity, params=values[start : start + _AT_ONCE])


def _allowed(name: str) -> str:
    return re.sub(r"[^\w\-./ ]", "_", name)
