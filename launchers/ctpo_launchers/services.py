"""Services of a node for its engines: a sandbox, and Ray."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ctpo_launchers import LaunchError
from ctpo_launchers.children import Child
from ctpo_launchers.job import NodeJob
from ctpo_launchers.timeouts import CHILD_POLL_S, RAY_RESTARTS
from ctpo_megatron.base.addresses import is_free
from ctpo_megatron.base.ray_environment import PARENT, PREFIX
from ctpo_megatron.checks import has_cuda_device
from ctpo_megatron.config import Config, Job, Placement, SandboxConfig, engine_count, needs_engines
from ctpo_sandbox import SandboxStartError, start_configured_server, temporary
from ctpo_sandbox.variables import node_url

log = logging.getLogger(__name__)

_UP = b"Ray runtime started."
_OBJECT_STORE_BYTES = 256 << 20


@dataclass(frozen=True)
class NodeNeeds:
    """Of one node. `cpus`: what Ray may promise to engines; `gpus`: those that it shows them, None on a CPU."""

    ray: bool
    sandbox: bool
    cpus: int
    gpus: str | None

    @classmethod
    def of(cls, config: Config, nodes: int, node_ranks: int) -> NodeNeeds:
        """On one node the trainer itself starts both: a private Ray, and a sandbox on a free port."""
        ray = nodes > 1 and needs_engines(config)
        placed = Placement.of(config, Job(nodes * node_ranks, node_ranks))
        gpus = placed.engine_devices(os.environ.get("CUDA_VISIBLE_DEVICES")) if has_cuda_device() else None
        # Engines of a lost node may move to another: the CPUs that Ray counts there are no limit.
        cpus = engine_count(config) * (config.rollout.engine.threads if gpus is None else 1)
        return cls(ray, ray and config.rollout.needs_sandbox and config.sandbox.url is None, cpus, gpus)


async def shared_token(path: Path, timeout_s: float, listens: tuple[str, int] | None = None) -> str:
    """Return the job's secret, in a file of mode 0600 that node 0 creates if missing. Raises LaunchError.

    listens: address and port of node 0, if it is this one; they must be free, too.
    """
    try:
        if listens is not None and not path.exists():
            aside = path.with_name(f"{path.name}.{os.getpid()}")
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
            aside.rename(path)
        await _appears(path, timeout_s)
        if problems := [*secret_problems(path), *(port_problems(*listens) if listens is not None else ())]:
            raise LaunchError("; ".join(problems))
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise LaunchError(f"the job's secret cannot be made or read: {error}") from error


def secret_problems(path: Path) -> Iterator[str]:
    """Check that only its owner can read the job's secret."""
    try:
        is_open, text = path.stat().st_mode & 0o077, path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        yield f"the job's secret cannot be made or read: {error}"
        return
    if is_open:
        yield f"{path} can be read or written by other users; type chmod 600 {path}"
    if not text.strip():
        yield f"{path} is empty: write a secret into it, or remove it and node 0 makes one"


def port_problems(address: str, port: int) -> Iterator[str]:
    """Check that node 0 can listen where the others look for it."""
    try:
        if not is_free(address, port):
            yield f"port {port} at {address} is taken by another program: give another --port, the same to all nodes"
    except OSError as error:
        yield f"{address} port {port}: {error.strerror}; is it an address of this node (--address)?"


async def _appears(path: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if time.monotonic() > deadline:
            raise LaunchError(
                f"{path} is not there after {timeout_s:g} s: the job's folder must be on a file system that all nodes "
                "share (--directory), or give the same secret to each in a file of mode 0600 (--token-file)"
            )
        await asyncio.sleep(CHILD_POLL_S)


@contextlib.asynccontextmanager
async def sandbox(settings: SandboxConfig, log_path: Path, token_file: Path) -> AsyncIterator[dict[str, str]]:
    """Provide the sandbox of this node, as variables for its engines: the service in the environment, else our own.

    Our own is on a loopback port, requires the job's secret, and is restarted when it dies. Raises LaunchError.
    """
    try:
        url = node_url()
    except ValueError as error:
        raise LaunchError(str(error)) from error
    if url is not None:
        log.info("programs run in this node's sandbox at %s", url)
        yield {}  # the engines inherit its address and token
        return
    os.environ["SANDBOX_TOKEN_FILE"] = str(token_file)
    try:
        server = await asyncio.to_thread(start_configured_server, settings, log_path)
    except SandboxStartError as error:
        raise LaunchError(str(error)) from error
    try:
        yield {"CTPO_SANDBOX_URL": server.url, "SANDBOX_TOKEN_FILE": str(token_file)}
    finally:
        await asyncio.to_thread(server.stop)


class RayNode:
    """Ray on this node: the head on node 0, elsewhere a worker, which is restarted when it ends.

    environment: of its engines. head: address and port of the head. lost: called when it cannot be kept running.
    """

    def __init__(
        self,
        job: NodeJob,
        needs: NodeNeeds,
        log_path: Path,
        environment: Mapping[str, str],
        head: str,
        directory: Path,
        lost: Callable[[str], None],
    ) -> None:
        self._log_path, self._is_head, self._lost, self._directory = log_path, job.rank == 0, lost, directory
        self._made_directory = self._is_head or not directory.exists()
        if self._made_directory:
            temporary.note(directory)
        gpus = {} if needs.gpus is None else {"CUDA_VISIBLE_DEVICES": needs.gpus}
        self._environment = {**environment, **gpus}
        where = ["--head", "--port", head.rpartition(":")[2], "--include-dashboard", "false", "--temp-dir", directory]
        self._arguments = ["start", "--block", *map(str, where if self._is_head else ["--address", head])]
        self._arguments += ["--node-ip-address", job.address, "--num-cpus", str(needs.cpus)]
        self._arguments += ["--num-gpus", str(len(needs.gpus.split(",")) if needs.gpus else 0)]
        self._arguments += ["--object-store-memory", str(_OBJECT_STORE_BYTES), "--disable-usage-stats"]
        self._child: Child | None = None

    @contextlib.asynccontextmanager
    async def running(self, timeout_s: float) -> AsyncIterator[None]:
        """Start it, and keep it running until the context ends. Raises LaunchError with the last lines of its log."""
        try:
            await self._start(timeout_s)
            keeper = asyncio.create_task(self._keep(timeout_s))
            try:
                yield
            finally:
                keeper.cancel()
                await asyncio.wait([keeper])
        finally:
            if self._child is not None:
                await self._child.kill()
            if self._made_directory:
                shutil.rmtree(self._directory, ignore_errors=True)

    async def _start(self, timeout_s: float) -> None:
        child = self._child = Child("ray", self._arguments, self._log_path, self._environment, spared=True)
        deadline = time.monotonic() + timeout_s
        while _UP not in child.output():
            if child.status is not None:
                raise LaunchError(f"Ray did not start (status {child.status}); {child.log_tail()}")
            if time.monotonic() > deadline:
                raise LaunchError(f"Ray is not up after {timeout_s:g} s; {child.log_tail()}")
            await asyncio.sleep(CHILD_POLL_S)

    async def _keep(self, timeout_s: float) -> None:
        for _ in range(RAY_RESTARTS):
            assert self._child is not None
            status = await self._child.wait()
            await self._child.kill()
            if self._is_head:
                return self._lost(f"Ray's head has ended with status {status}; {self._child.log_tail()}")
            log.warning("Ray has ended on this node with status %s; starting it again", status)
            try:
                await self._start(timeout_s)
            except LaunchError as error:
                return self._lost(str(error))
            log.warning("Ray is up again")
        self._lost(f"Ray has ended {RAY_RESTARTS} times on this node")


def new_ray_directory() -> Path:
    """Return a folder for the head's files, with a short path: Unix socket paths are limited to about 100
    characters.
    """
    return temporary.new_folder(PREFIX, PARENT)
