"""An endpoint that Prometheus scrapes: metrics of the latest step, counts of faults, and progress of the run."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ctpo_megatron.tracking.known_metrics import KNOWN_METRICS
from ctpo_megatron.tracking.timing import read_heartbeat

FAULTS = tuple(row.name for row in KNOWN_METRICS if row.fault)
"""Metrics of a step that count recovered faults."""
ADDRESS = ("127.0.0.1", 9464)
"""Default address."""
KEEP_ALIVE_S, END_S = 5, 1
MOST_CONNECTIONS = 64


class Prometheus:
    """Serves `http://<host>:<port>/metrics` without authentication; the address is in `trackers/prometheus.json`.

    On loopback it answers to names of loopback alone; elsewhere to any, as it cannot know its own.

    port: 0 chooses a free one. The heartbeat file is read at every scrape, so that a hanging run is visible. Raises
    ValueError when host and port are not available.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Mapping[str, Any],
        identity: str | None = None,
        host: str = ADDRESS[0],
        port: int = ADDRESS[1],
    ) -> None:
        import uvicorn
        from prometheus_client import CollectorRegistry, make_asgi_app

        from ctpo_sandbox.front import Guard, RequestRule, configured, is_loopback, listen, url_of

        self._run_dir, self._name = run_dir, str(config["run"]["name"])
        self._steps: dict[str, int] = {}
        self._latest: dict[str, float] = {}
        self._seconds: Counter[str] = Counter()
        self._faults = Counter(dict.fromkeys(FAULTS, 0.0))
        registry = CollectorRegistry()
        registry.register(self)
        try:
            listener = listen(host, port)
        except OSError as error:
            why = str(error.strerror or error).partition(" (")[0]
            raise ValueError(
                f"no metrics for Prometheus at {host}:{port}: {why}. Is that another run's? Give "
                "the tracker another port, or 0 for a free one"
            ) from error
        url = url_of(listener)
        rule = RequestRule(("GET",), is_loopback if is_loopback(url.removeprefix("http://")) else None)
        self._server = uvicorn.Server(
            configured(
                Guard(make_asgi_app(registry), rule, max_bytes=0),
                MOST_CONNECTIONS,
                log_level="error",
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=END_S,
            )
        )
        serve = self._server.serve(sockets=[listener])
        self._thread = threading.Thread(target=asyncio.run, args=(serve,), daemon=True)
        self._thread.start()
        self.identity = f"{url}/metrics"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Store the metrics of a step."""
        stage = "sft" if any(name.startswith("sft/") for name in metrics) else "rl"
        self._steps = {**self._steps, stage: step}
        self._latest = {**self._latest, **metrics}
        self._faults.update({name: metrics[name] for name in FAULTS if name in metrics})
        self._seconds.update({name.removeprefix("time/"): value for name, value in metrics.items() if _is_phase(name)})

    def close(self) -> None:
        """Stop serving."""
        self._server.should_exit = True
        self._thread.join()

    def collect(self) -> Iterator[Any]:
        """Called by the library at every scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        yield InfoMetricFamily("ctpo_run", "the run", {"name": self._name})
        yield _family(GaugeMetricFamily("ctpo_step", "latest step that is done", labels=["stage"]), self._steps)
        text = "metric of the latest step that has it, by its name in docs/reference/metrics.md"
        yield _family(GaugeMetricFamily("ctpo_metric", text, labels=["name"]), self._latest)
        text = "wall seconds in phases of the steps since the start"
        yield _family(CounterMetricFamily("ctpo_phase_seconds", text, labels=["phase"]), self._seconds)
        text = "what went wrong and was survived since the start, by its name in docs/reference/metrics.md"
        yield _family(CounterMetricFamily("ctpo_faults", text, labels=["kind"]), self._faults)
        if (heartbeat := read_heartbeat(self._run_dir)) is not None:
            now = time.time()
            yield GaugeMetricFamily("ctpo_heartbeat_age_seconds", "age of the heartbeat", value=now - heartbeat.time)
            text = "seconds since the last progress on rank zero"
            yield GaugeMetricFamily("ctpo_stall_seconds", text, value=now - heartbeat.progress)
            yield InfoMetricFamily("ctpo_phase", "where rank zero is", {"phase": heartbeat.phase})


def _is_phase(name: str) -> bool:
    return name.startswith("time/") and not name.endswith(("_cpu", "_fraction"))


def _family(family: Any, values: Mapping[str, float]) -> Any:
    for label, value in dict(values).items():
        family.add_metric([label], value)
    return family
