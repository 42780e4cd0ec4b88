"""A private, quiet Ray instance for the rollout side, or a connection to the cluster that RAY_ADDRESS names."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from pathlib import Path

_OBJECT_STORE_BYTES = 256 << 20
_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_enable_metrics_collection": "0",
}


class RayRuntime:
    """Connects on construction; `close` shuts down only what this object started.

    A local Ray lives exactly as long as the thread that created this object: the kernel kills Ray's processes when
    that thread ends, whichever way. Create it from a thread that lasts as long as the run.
    """

    def __init__(self, cpus: int) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import ray

        self._temp: Path | None = None
        self._owner = not ray.is_initialized()
        if not self._owner:
            return
        if os.environ.get("RAY_ADDRESS"):
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
            return
        # Unix socket paths are limited to about 100 characters, so TMPDIR is not used.
        self._temp = Path(tempfile.mkdtemp(prefix="ctpo-ray-", dir="/tmp"))
        ray.init(
            address="local",
            num_cpus=cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            object_store_memory=_OBJECT_STORE_BYTES,
            _temp_dir=str(self._temp),
        )

    @property
    def gpus(self) -> float:
        """GPUs of the whole cluster."""
        import ray

        return float(ray.cluster_resources().get("GPU", 0.0))

    def close(self) -> None:
        """Shut Ray down if this object started or joined it. Idempotent."""
        import ray

        if self._owner and ray.is_initialized():
            ray.shutdown()
        self._owner = False
        if self._temp is not None:
            shutil.rmtree(self._temp, ignore_errors=True)
            self._temp = None
