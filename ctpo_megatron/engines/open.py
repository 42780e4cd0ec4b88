"""An engine pool and its sandbox as configured, with a trainer or without one."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ctpo_megatron.base.event_loop import EventLoop
from ctpo_megatron.base.ray_environment import ADDRESS
from ctpo_megatron.base.run_paths import LogPaths
from ctpo_megatron.base.stop import StopRequest
from ctpo_megatron.config import ClusterConfig, Config, ConfigError, Placement, Problem, SandboxConfig
from ctpo_megatron.engines.pool import EnginePool
from ctpo_megatron.environments import lacking, names_a_server, needs_sandbox, node_sandbox_url, not_installed
from ctpo_sandbox import start_configured_server

log = logging.getLogger(__name__)


@contextmanager
def open_engines(
    config: Config, logs: Path, loop: EventLoop, *, placement: Placement | None, stop: StopRequest | None = None
) -> Iterator[EnginePool]:
    """Engines with the weights of `model.path`, which load in the background, and the sandbox that they need.

    logs: folder for the output of both. loop: of the pool. placement: the engines' GPUs; None: Ray may have all. stop:
    ends waits.
    Raises ConfigError, SandboxStartError.
    """
    with ExitStack() as stack:
        url: str | None = ""
        if needs_sandbox(config.rollout):
            url = stack.enter_context(_sandbox(config.sandbox, config.cluster.nodes, logs))
        log.info("engines: vLLM's model runner %s", config.rollout.engine.model_runner)
        cluster = cluster_of(config.cluster)
        local = None if cluster else placement
        pool = EnginePool(config, url, loop, log_dir=logs, placement=local, cluster=cluster, stop=stop)
        stack.enter_context(pool).start()
        yield pool


def cluster_of(cluster: ClusterConfig) -> ClusterConfig | None:
    """The Ray cluster to join, if there is one. Raises ConfigError when there should be."""
    if os.environ.get(ADDRESS):
        return cluster
    if cluster.nodes > 1:
        fix = "start the run with `ctpo launch`, or Ray on every node and export RAY_ADDRESS=HOST:PORT of its head"
        raise ConfigError([Problem("cluster.nodes", "but RAY_ADDRESS names no Ray cluster", fix, cluster.nodes)])
    return None


@contextmanager
def _sandbox(sandbox: SandboxConfig, nodes: int, logs: Path) -> Iterator[str | None]:
    """Address of the sandbox of all engines; None: every node has its own."""
    if sandbox.url is not None:
        for url in sandbox.url.split(","):
            _warn_of_missing(url)
        yield sandbox.url
        return
    if nodes > 1 or names_a_server():
        if names_a_server():
            _warn_of_missing(node_sandbox_url())
        yield None
        return
    with start_configured_server(sandbox, LogPaths(logs).sandbox) as server:
        _warn_of_missing(server.url)
        yield server.url


def _warn_of_missing(url: str) -> None:
    try:
        problems = list(lacking(not_installed(url), f"the sandbox {url}"))
    except OSError as error:  # its clients try for longer
        log.warning("warning: %s", error)
        return
    for problem in problems:
        log.warning("warning: %s", problem)
