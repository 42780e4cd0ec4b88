"""Who may talk to the Ray that a run starts for itself: Ray listens on all interfaces of the machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import grpc
import pytest
import ray

from ctpo_megatron.base.ray_environment import AUTH_MODE, TOKEN_FILE
from tests.support.deadlines import scaled

# A call that each kind of server knows.
CALLS = {
    "head": "/ray.rpc.NodeInfoGcsService/GetClusterId",
    "node": "/ray.rpc.NodeManagerService/GetNodeStats",
    "objects": "/ray.rpc.ObjectManagerService/Pull",
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("credentials", [(), (("authorization", "Bearer of nothing"),)])
@pytest.mark.parametrize("server", CALLS)
def test_it_answers_nobody_without_its_secret(
    server: str, credentials: tuple[tuple[str, str], ...], shared_ray: None
) -> None:
    [node] = ray.nodes()
    ports = {
        "head": ray.get_runtime_context().gcs_address.rpartition(":")[2],
        "node": node["NodeManagerPort"],
        "objects": node["ObjectManagerPort"],
    }
    address = f"{node['NodeManagerAddress']}:{ports[server]}"
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary(CALLS[server])(b"", timeout=60, metadata=credentials)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert (os.environ.get(AUTH_MODE), os.environ.get(TOKEN_FILE)) == (None, None)  # it is Ray's alone


DRIVER = """
import os, signal, sys
from ctpo_megatron.base.stop import StopSignal
from ctpo_megatron.engines import RayRuntime
signal.signal(signal.SIGHUP, signal.SIG_DFL)
stop = StopSignal(grace_s=60)
runtime = RayRuntime(1)
runtime.started.result(float(sys.argv[2]))
with stop.deferred():
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    while not stop.is_set(): pass
    runtime.close()
sys.exit(stop.leave())
"""


def ended_by(name: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", DRIVER, name, str(scaled(60))]
    return subprocess.run(command, capture_output=True, text=True, timeout=scaled(120), check=False)


@pytest.mark.parametrize(
    ("name", "said", "status"),
    [
        ("SIGTERM", "SIGTERM", 143),
        pytest.param("SIGINT", "Ctrl-C", 130, marks=pytest.mark.slow),
        pytest.param("SIGHUP", "SIGHUP", 143, marks=pytest.mark.slow),
        pytest.param("SIGUSR1", "SIGUSR1", 143, marks=pytest.mark.slow),
    ],
)
def test_a_signal_that_asks_to_end_gives_our_message_alone(name: str, said: str, status: int) -> None:
    done = ended_by(name)
    assert (done.returncode, done.stdout) == (status, "")
    assert done.stderr == f"{said}: a checkpoint follows, within 60 s (checkpoint.grace_s)\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGBUS"])
def test_a_fault_keeps_its_native_trace(name: str) -> None:
    done = ended_by(name)
    assert done.returncode == -getattr(signal, name)
    assert f"*** {name} received at" in done.stderr and "PC: @" in done.stderr
