"""An engine pool and its sandbox as configured, with a trainer or without one."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ctpo_megatron.base.event_loop import EventLoop
from ctpo_megatron.base.ray_environment import ADDRESS
from ctpo_megatron.base.stop import StopRequest
from ctpo_megatron.config import Config, ConfigError, Placement, Problem
from ctpo_megatron.engines.cluster import NodeCheck, RayCluster
from ctpo_megatron.engines.pool import EnginePool
from ctpo_megatron.environments import needs_sandbox, open_sandbox

log = logging.getLogger(__name__)


@contextmanager
def open_engines(
    config: Config,
    logs: Path,
    loop: EventLoop,
    *,
    placement: Placement | None,
    check: Callable[[], NodeCheck],
    stop: StopRequest | None = None,
) -> Iterator[EnginePool]:
    """Engines with the weights of `model.path`, which load in the background, and the sandbox that they need.

    logs: folder for the output of both. loop: runs the pool. placement: the engines' GPUs; None: Ray may have all.
    check: makes what every node of a Ray cluster has to pass, where RAY_ADDRESS names one. stop: ends waits.
    Raises ConfigError, SandboxStartError.
    """
    cluster = RayCluster(config.cluster, check()) if os.environ.get(ADDRESS) else None
    if cluster is None and config.cluster.nodes > 1:
        fix = "start the run with `ctpo launch`, or Ray on every node and export RAY_ADDRESS=HOST:PORT of its head"
        raise ConfigError([Problem("cluster.nodes", "but RAY_ADDRESS names no Ray cluster", fix, config.cluster.nodes)])
    with ExitStack() as stack:
        url: str | None = ""
        if needs_sandbox(config.rollout):
            url = stack.enter_context(open_sandbox(config.sandbox, config.cluster.nodes, logs))
        log.info("engines: vLLM's model runner %s", config.rollout.engine.model_runner)
        local = None if cluster else placement
        pool = EnginePool(config, url, loop, log_dir=logs, placement=local, cluster=cluster, stop=stop)
        stack.enter_context(pool).start()
        yield pool
