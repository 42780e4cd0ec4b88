"""Real Ray nodes for tests: the head on this host, a worker in a network namespace, and a virtual cable between them.

A worker has its own loopback, process ids and /dev/shm, as a second machine would, and shares files unless told not to.
Root is needed, and the programs `ip` and `unshare`.
"""

from __future__ import annotations

import itertools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ctpo_megatron.base.processes import wait_for
from ctpo_megatron.base.ray_environment import ADDRESS, ray_with_token
from tests.support.deadlines import scaled

ROOT = Path(__file__).resolve().parents[2]
OBJECT_STORE_BYTES = 100 << 20
_START_TIMEOUT_S = 90.0
_RAY = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--object-store-memory={OBJECT_STORE_BYTES}"]


def missing() -> str:
    """Why this machine cannot run such nodes; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [program for program in ("ip", "unshare") if shutil.which(program) is None]
    if absent:
        return f"{' and '.join(absent)} missing: apt-get install iproute2 util-linux"
    probe = subprocess.run(["unshare", "--net", "--pid", "--fork", "true"], capture_output=True, text=True)
    return f"no namespaces here: {probe.stderr.strip()}" if probe.returncode else ""


@dataclass
class Node:
    """A Ray node: its address and all of its processes."""

    address: str
    process: subprocess.Popen[bytes]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    def processes(self, name: str = "") -> list[psutil.Process]:
        """Those whose command line holds `name`, oldest first."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if name in _command_line(child)]

    def kill(self) -> None:
        """SIGKILL to everything that runs on the node, at once for a worker (its init dies)."""
        try:
            everything = [*self.processes(), psutil.Process(self.process.pid)]
        except psutil.NoSuchProcess:
            everything = []
        for process in reversed(everything):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait(scaled(30))
        wait_for(everything, scaled(30))


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


class Cable:
    """Two ends of a virtual cable: `here` on this host and `there` in a new network namespace."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        number = next(self._numbers)
        subnet = f"10.{200 + os.getpid() % 50}.{(os.getpid() // 50 + number) % 250}"
        self.namespace, self._end = f"ctpo{os.getpid()}n{number}", f"c{os.getpid()}n{number}"
        self.here, self.there = f"{subnet}.1", f"{subnet}.2"
        _ip("netns", "add", self.namespace)
        _ip("link", "add", self._end, "type", "veth", "peer", "name", "eth0", "netns", self.namespace)
        _ip("addr", "add", f"{self.here}/24", "dev", self._end)
        _ip("link", "set", self._end, "up")
        for interface, address in (("lo", ""), ("eth0", f"{self.there}/24")):
            if address:
                _ip("-n", self.namespace, "addr", "add", address, "dev", interface)
            _ip("-n", self.namespace, "link", "set", interface, "up")

    def reach_all(self) -> None:
        """Other addresses of this host can be reached from there, too."""
        _ip("-n", self.namespace, "route", "add", "default", "via", self.here)

    def unplug(self) -> None:
        """Nothing passes any more, and nobody is told."""
        _ip("link", "set", self._end, "down")

    def reset(self) -> None:
        """The connections of the node are broken, as a firewall that forgets them does."""
        subprocess.run(
            ["ip", "netns", "exec", self.namespace, "ss", "-K", "dst", self.here], check=True, capture_output=True
        )

    def plug_in(self) -> None:
        """As before."""
        _ip("link", "set", self._end, "up")

    def remove(self) -> None:
        """Both ends and the namespace."""
        subprocess.run(["ip", "link", "del", self._end], capture_output=True)
        _ip("netns", "del", self.namespace)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class TwoNodes:
    """A Ray cluster with a head on this host and a worker at the other end of a cable.

    environment: of all nodes and of a driver. folder: shared by both nodes, removed at the end.
    """

    def __init__(self, *, head_cpus: int = 0) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ctpo-nodes-", dir="/tmp"))  # short: Ray puts sockets there
        self.cable = Cable()
        self.token_file = self.folder / "token"
        self.token_file.touch(0o600)
        self.token_file.write_text(os.urandom(16).hex())
        self.environment = ray_with_token(self.token_file)
        self.address = f"{self.cable.here}:{_free_port(self.cable.here)}"
        self.driver_environment = self.environment | {ADDRESS: self.address}
        self.nodes: list[Node] = []
        try:
            self.head = self._start_head(head_cpus)
        except BaseException:
            self.close()
            raise

    def _start_head(self, cpus: int) -> Node:
        port = self.address.rpartition(":")[2]
        options = ["--head", "--include-dashboard=false", "--no-monitor"]
        options += [f"--ray-client-server-port={_free_port(self.cable.here)}"]
        options += [f"--port={port}", f"--node-ip-address={self.cable.here}", f"--num-cpus={cpus}", "--num-gpus=0"]
        return self._start(self.cable.here, "head", [*_RAY, *options, f"--temp-dir={self.folder / 'head'}"], {})

    def start_worker(
        self,
        cpus: int = 1,
        environment: Mapping[str, str] | None = None,
        hidden: Sequence[Path] = (),
        *,
        here: bool = False,
    ) -> Node:
        """A worker in the namespace at the other end of the cable, or on the head's host."""
        name, address = ("spare", self.cable.here) if here else ("worker", self.cable.there)
        options = [f"--address={self.address}", f"--node-ip-address={address}"]
        options += [f"--num-cpus={cpus}", "--num-gpus=0", f"--temp-dir={self.folder / name}"]
        own = self.folder / f"{name}-tmp"
        own.mkdir(exist_ok=True)
        command = [*([] if here else self.in_namespace(hidden)), *_RAY, *options]
        return self._start(address, name, command, {"TMPDIR": str(own), **(environment or {})})

    def _start(self, address: str, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Node:
        log = self.folder / f"{name}-{len(self.nodes)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **self.environment, **environment},
                start_new_session=True,
            )
        node = Node(address, process, log, environment)
        self.nodes.append(node)
        _wait_for_text(node, "Ray runtime started")
        return node

    def in_namespace(self, hidden: Sequence[Path] = ()) -> list[str]:
        """What to put before a command that shall run on the worker's machine; it does not see `hidden` folders."""
        mounts = " && ".join(f"mount -t tmpfs tmpfs {folder}" for folder in ("/dev/shm", *hidden))
        isolate = ["ip", "netns", "exec", self.cable.namespace]
        isolate += ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return [*isolate, "sh", "-c", f'{mounts} && exec "$@"', "sh"]

    def close(self) -> None:
        """End all nodes and remove what they left."""
        for node in reversed(self.nodes):
            node.kill()
        self.cable.remove()
        shutil.rmtree(self.folder, ignore_errors=True)


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as listener:
        return int(listener.getsockname()[1])


def _wait_for_text(node: Node, text: str) -> None:
    deadline = time.monotonic() + scaled(_START_TIMEOUT_S)
    while text not in node.log.read_text(errors="replace"):
        if node.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(
                f"the Ray node {node.address} did not start:\n{node.log.read_text(errors='replace')[-3000:]}"
            )
        time.sleep(0.2)


@contextmanager
def two_nodes(**options: object) -> Iterator[TwoNodes]:
    """A cluster without its worker yet; ended on leaving."""
    cluster = TwoNodes(**options)  # type: ignore[arg-type]
    try:
        yield cluster
    finally:
        cluster.close()


_SANDBOX = """
import pathlib, sys, time
from ctpo_sandbox import start_server
log = pathlib.Path(sys.argv[1])
with start_server(slots=2, start_timeout_s=120, require="none", tiers=["stdlib"], log_path=log) as server:
    print(server.url, flush=True)
    time.sleep(3600)
"""


@contextmanager
def sandbox_of_worker(cluster: TwoNodes, *, here: bool = False) -> Iterator[Node]:
    """A sandbox on the worker's own loopback, with a token by file; `environment`: what Ray's processes there need.

    here: of a worker on the head's host.
    """
    shared = {"SANDBOX_TOKEN_FILE": str(cluster.token_file)}
    log = cluster.folder / f"sandbox{'-here' if here else ''}.log"
    command = [*([] if here else cluster.in_namespace()), sys.executable, "-c", _SANDBOX, str(log)]
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **shared}, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    url = process.stdout.readline().decode().strip()
    node = Node(cluster.cable.there, process, log, {**shared, "CTPO_SANDBOX_URL": url})
    try:
        assert url.startswith("http://127.0.0.1:"), node.log.read_text()
        yield node
    finally:
        node.kill()
