"""What `GET /metrics` reports, in Prometheus's text format."""

from dataclasses import asdict
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ctpo_sandbox.server.pool import Pool, RunResult

M = TypeVar("M", Counter, Gauge, Histogram)
_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)


class Metrics:
    """Counters of one server."""

    def __init__(self, pool: Pool, node: str) -> None:
        self._node, self._registry = node, CollectorRegistry()
        self.runs = 0
        """Finished runs."""

        self._runs = self._new(Counter, "runs", "Finished runs by verdict.", "status")
        self._rejected = self._new(Counter, "rejected", "Requests without a verdict, by HTTP status.", "code")
        self._wall = self._new(Histogram, "run_seconds", "Wall time of runs.", buckets=_BUCKETS).labels(node)
        self._queue = self._new(Histogram, "queue_seconds", "Time runs waited for a slot.", buckets=_BUCKETS).labels(
            node
        )
        self._cpu = self._new(Counter, "cpu_seconds", "CPU time of runs.").labels(node)
        for name, text, value in (
            ("slots", "Runs that can run at once.", lambda: pool.slots),
            ("idle_slots", "Slots without a run.", lambda: pool.idle),
            ("waiting", "Requests waiting for a slot.", lambda: pool.waiting),
            ("lost", "Attempts that ended with the loss of a template or worker.", lambda: pool.lost),
            ("blamed", "Programs that ended their workers, answered runtime_error.", lambda: pool.blamed),
            ("restarts", "Templates and workers replaced since the start.", lambda: pool.restarts),
        ):
            self._new(Gauge, name, text).labels(node).set_function(value)
        limits = self._new(Gauge, "limit", "Limits of a run, those that are set.", "name")
        for name, limit in asdict(pool.limits).items():
            if limit is not None:
                limits.labels(node, name).set(limit)

    def _new(self, kind: type[M], name: str, text: str, *labels: str, **options: Any) -> M:
        """A metric with the node as its first label, because all servers on loopback have the same address."""
        return kind(f"ctpo_sandbox_{name}", text, ["node", *labels], registry=self._registry, **options)

    def finished(self, run: RunResult, status: str) -> None:
        """Count a verdict."""
        self.runs += 1
        self._runs.labels(self._node, status).inc()
        self._wall.observe(run.outcome.wall_s)
        self._queue.observe(run.queue_s)
        self._cpu.inc(run.outcome.cpu_s)

    def rejected(self, code: int) -> None:
        """Count a request without a verdict."""
        self._rejected.labels(self._node, str(code)).inc()

    def text(self) -> bytes:
        """Return the metrics as text."""
        return generate_latest(self._registry)
