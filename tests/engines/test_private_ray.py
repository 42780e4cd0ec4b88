"""Who may talk to the Ray that a run starts for itself: Ray listens on all interfaces of the machine."""

from __future__ import annotations

import os

import grpc
import pytest
import ray

from ctpo_megatron.base.ray_environment import AUTH_MODE, TOKEN_FILE

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
