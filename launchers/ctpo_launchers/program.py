"""One node of a job, from the start of its sandbox to the final cleanup."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ctpo_launchers import LaunchError
from ctpo_launchers.child import stop_status
from ctpo_launchers.children import Child
from ctpo_launchers.job import NodeJob, free_ports
from ctpo_launchers.roll_call import Connection, RollCall, report
from ctpo_launchers.services import NodeNeeds, RayNode, new_ray_directory, sandbox, shared_token
from ctpo_launchers.timeouts import AFTER_GRACE_S, CHILD_POLL_S
from ctpo_megatron.base.ray_environment import ADDRESS, ray_with_token
from ctpo_megatron.base.run_paths import LogPaths, RunPaths
from ctpo_megatron.base.stop import heeded
from ctpo_megatron.config import Config

log = logging.getLogger(__name__)

NOT_READY, LOST = 3, 4
"""Exit statuses in addition to the trainer's: a node that did not start; a node, or Ray's head, lost while training."""


class NodeProgram:
    """One node of a job. `arguments`: of the trainer, the configuration file first."""

    def __init__(self, args: argparse.Namespace, job: NodeJob, config: Config, arguments: Sequence[str]) -> None:
        self._args, self._job, self._config, self._arguments = args, job, config, list(arguments)
        self._needs = NodeNeeds.of(config, job.nodes, args.nproc_per_node)
        base = args.directory or RunPaths(config.run.directory).nodes
        self._token_file = (args.token_file or base / "token").absolute()
        self._logs = base.absolute() / f"node{job.rank}"
        self.status_file = self._logs / "status"
        """The exit status, written when the program ends."""
        self._trainer: Child | None = None
        self._until, self._reason = float("inf"), ""
        self._status = 0
        self._others: RollCall | None = None
        self._main: asyncio.Task[int] | None = None
        self._stop_signal: int | None = None
        self._over = asyncio.Event()

    def prepare(self) -> None:
        """Create the folder of this node's logs, without the status of an earlier attempt. Raises OSError."""
        self._logs.mkdir(parents=True, exist_ok=True)
        self.status_file.unlink(missing_ok=True)

    async def run(self) -> int:
        """Start everything and wait for its end; returns the exit status."""
        self._main = asyncio.current_task()
        for number in heeded():
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        try:
            async with contextlib.AsyncExitStack() as stack:
                if self._job.nodes == 1:
                    return await self._train(["--standalone"], {})
                await (self._run_head(stack) if self._job.rank == 0 else self._run_worker(stack))
                return self._status
        except LaunchError as error:
            log.error("%s", error)
            return NOT_READY
        except asyncio.CancelledError:
            if self._reason:
                log.error("%s", self._reason)
                return NOT_READY
            if self._stop_signal is None:
                raise
            log.error("%s before training began: leaving", signal.Signals(self._stop_signal).name)
            return stop_status(self._stop_signal)

    async def _run_head(self, stack: contextlib.AsyncExitStack) -> None:
        job, timeout_s = self._job, self._args.start_timeout
        token = await shared_token(self._token_file, timeout_s, (job.address, job.port))
        try:
            ray_port, master_port = free_ports(job.address, job.port + 1, 2)
        except OSError as error:
            raise LaunchError(str(error)) from error
        folder = new_ray_directory() if self._needs.ray else Path()
        facts = {"ray": f"{job.address}:{ray_port}", "folder": str(folder), "master": f"{job.address}:{master_port}"}
        names = {rank: job.name(rank) for rank in range(1, job.nodes)}
        others = self._others = RollCall(names, token, facts, self._peer_over)
        environment = await self._services(stack, facts)
        await stack.enter_async_context(others.open(job.address, job.port))
        try:
            await others.all_in("ready", timeout_s)
            await others.broadcast(state="start")
            status = await self._train(self._of_many(facts), environment)
            self._status = self._status or status
            await self._wait_for_others(others)
        except BaseException as error:
            self._reason = self._reason or str(error) or type(error).__name__
            raise
        finally:
            await others.broadcast(state="end", reason=self._reason)

    async def _wait_for_others(self, others: RollCall) -> None:
        """Wait until the other trainers have ended; those that have not are stopped, with the reason."""
        limit = self._args.after_loss
        if self._stop_signal is not None:  # they have the same time to save
            limit = max(limit, self._until - time.monotonic())
        try:
            await others.all_in("ended", limit)
        except LaunchError as error:
            log.warning("%s", error)
            self._reason = self._reason or f"the trainer of {self._job.name(0)} has ended with status {self._status}"
            self._status = self._status or LOST

    async def _run_worker(self, stack: contextlib.AsyncExitStack) -> None:
        job, timeout_s = self._job, self._args.start_timeout
        token = await shared_token(self._token_file, timeout_s)
        head, facts = await report(job.head, job.port, job.rank, token, timeout_s)
        stack.callback(head.close)
        try:
            environment = await self._services(stack, facts)
        except LaunchError as error:
            await head.send(state="failed", reason=str(error))
            raise
        await head.send(state="ready")
        try:
            first = await head.receive(timeout_s)
        except asyncio.CancelledError:
            await head.send(state="failed", reason=self._reason or "it was stopped")
            raise
        except TimeoutError:
            raise LaunchError(f"the other nodes were not ready after {timeout_s:g} s: see the head's output") from None
        if first is None or first.get("state") != "start":
            raise LaunchError(f"the head has stopped: {first.get('reason') if first else 'its node program is gone'}")
        listener = asyncio.create_task(self._listen(head))
        self._status = await self._train(self._of_many(facts), environment)
        await head.send(state="ended", status=self._status)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2 * self._args.after_loss):
                await self._over.wait()
        listener.cancel()

    async def _services(self, stack: contextlib.AsyncExitStack, facts: dict[str, Any]) -> dict[str, str]:
        """Start what the engines need; returns the trainer's environment."""
        name = self._job.interface
        names = {} if name is None else {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
        environment = {key: os.environ.get(key, value) for key, value in names.items()}
        if not self._needs.ray:
            return environment
        environment |= ray_with_token(self._token_file)
        os.environ.pop(ADDRESS, None)  # may name another cluster, which `ray start` would contact
        of_engines = dict(environment)
        if self._needs.sandbox:
            found = sandbox(self._config.sandbox, LogPaths(self._logs).sandbox, self._token_file)
            of_engines |= await stack.enter_async_context(found)
        ray = RayNode(
            self._job, self._needs, self._logs / "ray.log", of_engines, facts["ray"], Path(facts["folder"]), self._fail
        )
        await stack.enter_async_context(ray.running(self._args.start_timeout))
        return {**environment, ADDRESS: facts["ray"]}

    def _of_many(self, facts: dict[str, Any]) -> list[str]:
        rendezvous = ["--rdzv-backend", "static", "--rdzv-endpoint", facts["master"]]
        return ["--nnodes", str(self._job.nodes), "--node-rank", str(self._job.rank), *rendezvous]

    async def _train(self, options: list[str], environment: dict[str, str]) -> int:
        """Run torchrun to its end; returns the exit status of this node."""
        grace_s = self._config.checkpoint.grace_s + AFTER_GRACE_S
        each = ["--nproc-per-node", str(self._args.nproc_per_node), "--module", self._args.module]
        trainer = self._trainer = Child(
            "torchrun",
            [*options, *each, *self._arguments],
            self._logs / "trainer.log",
            {**environment, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{grace_s:.0f}"},
            spared=False,
        )
        echo = asyncio.create_task(trainer.echo())
        stopping = False
        try:
            while trainer.status is None and time.monotonic() < self._until:
                if self._reason and not stopping:
                    stopping = True
                    log.error("stopping the trainer within %g s: %s", self._args.after_loss, self._reason)
                    trainer.signal(signal.SIGTERM)
                    self._until = min(self._until, time.monotonic() + self._args.after_loss)
                await asyncio.sleep(CHILD_POLL_S)
        finally:
            await trainer.kill()
            echo.cancel()
            await asyncio.wait([echo])
        status = trainer.status
        assert status is not None
        return LOST if self._reason else status

    def _peer_over(self, name: str, status: int | None) -> None:
        """The trainer of another node has ended, or the node is lost: ours will stop soon."""
        if status is None:
            self._fail(f"{name} is lost: see its logs")
        elif status:
            log.warning("the trainer of %s has ended with status %d", name, status)
            self._status = self._status or status
            self._until = min(self._until, time.monotonic() + self._args.after_loss)

    async def _listen(self, head: Connection) -> None:
        """Handle messages of node 0 while this node trains, and its loss."""
        message = await head.receive()
        self._over.set()
        if message is None:
            self._fail(f"{self._job.name(0)} is lost: see its logs")
        elif message.get("reason"):
            self._fail(message["reason"])

    def _fail(self, reason: str) -> None:
        """The job cannot continue: stop the trainer and ignore its status, or do not start it."""
        if self._trainer is not None and self._trainer.status is not None:
            return
        self._reason = self._reason or reason
        if self._others is not None:
            self._broadcasting = asyncio.ensure_future(self._others.broadcast(state="end", reason=reason))
        if self._trainer is None:
            self._leave()

    def _leave(self) -> None:
        """Start the cleanup, once: a second call would interrupt it."""
        if self._main is not None:
            self._main.cancel()
            self._main = None

    def _on_signal(self, number: int) -> None:
        """Signal the ranks to save and stop; without ranks, exit at once."""
        self._stop_signal = self._stop_signal or number
        if self._trainer is None:
            return self._leave()
        self._trainer.signal(number)
        self._until = min(self._until, time.monotonic() + self._config.checkpoint.grace_s + AFTER_GRACE_S)
