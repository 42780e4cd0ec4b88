"""What a Ray cluster must be like: every refusal but those of real nodes, which are in tests/cluster."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron.base.event_loop import EventLoop
from ctpo_megatron.config import ClusterConfig, ConfigError
from ctpo_megatron.engines import EngineError, EnginePool, join_ray, open_engines
from ctpo_megatron.environments import PythonTool
from tests.engines.pool_helpers import make_config
from tests.support.deadlines import scaled

VARIABLES = ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Why a cluster with these settings is not joined, given variables of Ray; without one its head is not there."""

    def refuse(address: str = "", variables: dict[str, str] | None = None, **cluster: Any) -> str:
        for name in VARIABLES:
            monkeypatch.delenv(name, raising=False)
        for name, value in {"RAY_ADDRESS": address or nowhere(), **(variables or {})}.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(EngineError) as error:
            join_ray(ClusterConfig(**cluster))
        return str(error.value)

    return refuse


def nowhere() -> str:
    """Return an address that refuses connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"127.0.0.1:{listener.getsockname()[1]}"


def token_file(path: Path, mode: int = 0o600) -> dict[str, str]:
    path.touch()
    path.chmod(mode)
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}


def test_several_nodes_need_a_token_that_only_its_owner_reads(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "does not answer" in refused(variables=token_file(tmp_path / "token"), nodes=2)
    environments = {
        "RAY_AUTH_MODE=disabled and RAY_AUTH_TOKEN_PATH=None name no file": {"RAY_AUTH_MODE": "disabled"},
        f"{tmp_path} name no file": {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path)},
        "chmod 600": token_file(tmp_path / "open", 0o640),
        "unset it": token_file(tmp_path / "token") | {"RAY_AUTH_TOKEN": "secret"},
    }
    for text, environment in environments.items():
        said = refused(variables=environment, nodes=2)
        assert text in said and "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=FILE, with the same secret" in said
        assert "does not answer" in refused(variables=environment)  # one node needs none


def test_a_head_that_does_not_answer_is_named(refused: Callable[..., str]) -> None:
    """RAY_ADDRESS may be left from another project."""
    address = nowhere()
    text = refused(address=address)
    assert text.startswith(f"RAY_ADDRESS={address}: Ray's head does not answer (") and "refused" in text
    assert "type unset RAY_ADDRESS" in text and "does not answer" in refused(address="127.0.0.1:65536")
    for wrong in ("ray://host:10001", "127.0.0.1", "127.0.0.1:redis"):
        assert f"RAY_ADDRESS={wrong}: give HOST:PORT of Ray's head" in refused(address=wrong)


def test_an_address_of_another_machine_is_refused(refused: Callable[..., str]) -> None:
    assert "does not answer" in refused(node_address="127.0.0.1")
    assert "cluster.node_address=192.0.2.1 is no address of this machine" in refused(node_address="192.0.2.1")


def test_several_nodes_without_a_cluster_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    two = make_config(tmp_path, tmp_path, sections={"cluster": {"nodes": 2}})
    text = r"cluster.nodes = 2: but RAY_ADDRESS names no Ray cluster; start the run"
    with EventLoop() as loop, pytest.raises(ConfigError, match=text):
        open_engines(two, tmp_path, loop, placement=None, check=lambda: FITS).__enter__()


FITS = lambda *_: []  # noqa: E731 - Ray sends it by value


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("check", "settings", "text"),
    [
        (
            FITS,
            {"engines": 3},
            r"no place for 3 engines of 3 CPU and 0 GPU each; the cluster has\n  [^\n]+ CPU, ",
        ),
        (FITS, {"sections": {"cluster": {"nodes": 2}}}, r"1 Ray nodes are there, and cluster.nodes is 2: .* \(4 CPU, "),
        (lambda *needs: [f"needs {needs}"], {}, r"1 problems of the Ray nodes:\n  [\d.]+: needs \(True, True\)$"),
        (lambda *_: [f"here is {1 / 0}"], {}, r"1 problems of the Ray nodes:\n  [\d.]+: could not be asked: Zero"),
        (lambda *_: time.sleep(60), {"start_timeout_s": 3}, r"[\d.]+: did not answer in time \(rollout.start_timeout"),
    ],
    ids=["no place", "a node is missing", "a node differs", "a check that fails", "a node that is silent"],
)
def test_engines_start_only_on_nodes_that_are_there_and_alike(
    shared_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: Any, settings: dict[str, Any], text: str
) -> None:
    """On a cluster of one node, which this process has joined: the tests' own Ray, of four processors."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # a process that joins a cluster keeps it
    engine = {"max_model_len": 320, "kv_cache_mb": 32, "threads": 3}
    config = make_config(tmp_path, tmp_path, **{"engine": engine, "start_timeout_s": scaled(20)} | settings)
    with EventLoop() as loop, EnginePool(config, None, loop, check=check) as fleet:
        fleet.start()
        with pytest.raises(EngineError, match=text):
            fleet.wait_ready()
    assert "RAY_ADDRESS" not in os.environ


def test_engines_share_the_sandbox_of_their_node_only(tmp_path: Path) -> None:
    """64 engines on 8 nodes: 8 of them share the 4 slots of a node's server."""
    sandbox = make_config(tmp_path, tmp_path).sandbox.model_copy(update={"slots": 4, "max_concurrency": 640})

    def concurrency(engines: int, nodes: int) -> int:
        return PythonTool(sandbox, "http://127.0.0.1:1", engines, nodes)._client._max_concurrency

    assert [concurrency(1, 1), concurrency(8, 1), concurrency(64, 8), concurrency(64, 1)] == [16, 2, 2, 1]
