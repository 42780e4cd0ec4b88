"""What a Ray cluster must be like: the refusals, without a Ray. Real nodes are in tests/cluster."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ctpo_megatron.config import ConfigError
from ctpo_megatron.engines import EngineError
from ctpo_megatron.engines.cluster import Needs, Node, differences, node_facts
from ctpo_megatron.engines.engine_log import mark, path_here, unmark
from ctpo_megatron.engines.open import cluster_of
from ctpo_megatron.engines.ray_runtime import await_head, check_address, check_token
from ctpo_megatron.engines.tasks import EngineSpec
from ctpo_megatron.environments import PythonTool, node_sandbox_problem
from tests.engines.pool_helpers import make_config


def token_file(path: Path, mode: int = 0o600) -> dict[str, str]:
    path.touch()
    path.chmod(mode)
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)}


def test_several_nodes_need_a_token_that_only_its_owner_reads(tmp_path: Path) -> None:
    check_token(1, {})
    check_token(2, token_file(tmp_path / "token"))
    environments = {
        "export RAY_AUTH_MODE=token": {"RAY_AUTH_MODE": "disabled"},
        "RAY_AUTH_TOKEN_PATH=None": {"RAY_AUTH_MODE": "token"},
        "is no file": {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path)},
        "chmod 600": token_file(tmp_path / "open", 0o640),
        "unset it": token_file(tmp_path / "token") | {"RAY_AUTH_TOKEN": "secret"},
    }
    for said, environment in environments.items():
        with pytest.raises(EngineError, match=said):
            check_token(2, environment)


def test_a_head_that_does_not_answer_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        await_head(address, time.monotonic())
    with pytest.raises(EngineError, match=rf"RAY_ADDRESS={address}: Ray's head does not answer: .*refused"):
        await_head(address, time.monotonic())
    with pytest.raises(EngineError, match="Ray Client is not supported"):
        await_head("ray://host:10001", time.monotonic())
    for port in ("redis", "", "65536"):
        with pytest.raises(EngineError, match=f"'{port}' is no port; give HOST:PORT"):
            await_head(f"127.0.0.1:{port}", time.monotonic())


def test_a_head_that_is_waited_for_is_named_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """RAY_ADDRESS may be left from another project; the deadline is minutes away."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(EngineError):
        await_head(address, time.monotonic() + 1.4)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"RAY_ADDRESS={address}: Ray's head does not answer (")
    assert "waiting for it, 1 s at most (rollout.start_timeout_s). Type unset RAY_ADDRESS" in said


def test_an_address_of_another_machine_is_refused() -> None:
    for own in (None, "127.0.0.1"):
        check_address(own)
    with pytest.raises(EngineError, match=r"cluster.node_address=192.0.2.1 is no address of this machine"):
        check_address("192.0.2.1")


def test_several_nodes_without_a_cluster_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = make_config(tmp_path, tmp_path)
    assert cluster_of(config.cluster) is None
    two = config.model_copy(update={"cluster": config.cluster.model_copy(update={"nodes": 2})})
    with pytest.raises(ConfigError, match=r"cluster.nodes = 2: but RAY_ADDRESS names no Ray cluster; start the run"):
        cluster_of(two.cluster)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert cluster_of(two.cluster) is two.cluster


def test_engines_of_a_node_are_counted_by_what_is_scarce() -> None:
    node = Node("id", "10.0.0.1", cpus=5, gpus=4)
    assert [node.holds(needs) for needs in ({"CPU": 1, "GPU": 2}, {"CPU": 2, "GPU": 0}, {"CPU": 6, "GPU": 0})] == [
        2,
        2,
        0,
    ]


def test_all_that_differs_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for model in (here, there):
        model.mkdir()
        (model / "config.json").write_text("{}")
        (model / "tokenizer.json").write_text(model.name)
    monkeypatch.delenv("CTPO_SANDBOX_URL", raising=False)
    needs = Needs(str(here), [str(tmp_path), "/nowhere"], sandbox=True)
    mine = node_facts(replace(needs, sandbox=False))
    other = node_facts(replace(needs, model_path=str(there)))
    other["versions"]["vllm"] = "0.1"
    other["versions"].pop("python")
    python = mine["versions"]["python"]
    assert [str(problem) for problem in differences(mine, other, needs)] == [
        f"python is missing, and {python} where the trainer runs",
        f"vllm is 0.1, and {mine['versions'].get('vllm', 'missing')} where the trainer runs",
        f"tokenizer.json in {here} (model.path): not the same files as where the trainer runs",
        "has no folder /nowhere (extensions.path)",
        "this node has no sandbox: CTPO_SANDBOX_URL is not set for its Ray processes. Start the node with "
        "`python -m ctpo_launchers.node`, or set sandbox.url",
    ]
    gone = node_facts(replace(needs, model_path=str(tmp_path / "gone"), sandbox=False))
    assert any(p.message.startswith(f"has no model at {here} (model.path)") for p in differences(mine, gone, needs))
    assert "torch" in mine["versions"] and len(mine["versions"]["code of ctpo-megatron"]) == 12


def test_a_nodes_sandbox_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    monkeypatch.setenv("CTPO_SANDBOX_URL", url)
    assert f"its sandbox {url} (CTPO_SANDBOX_URL) does not answer" in str(node_sandbox_problem())
    monkeypatch.setenv("SANDBOX_TOKEN_FILE", token_file(tmp_path / "token", 0o644)["RAY_AUTH_TOKEN_PATH"])
    assert "can be read or written by other users" in str(node_sandbox_problem())


def test_engines_share_the_sandbox_of_their_node_only(tmp_path: Path) -> None:
    """64 engines on 8 nodes: 8 of them share the 4 slots of a node's server."""
    sandbox = make_config(tmp_path, tmp_path).sandbox.model_copy(update={"slots": 4, "max_concurrency": 640})

    def concurrency(engines: int, nodes: int) -> int:
        return PythonTool(sandbox, "http://127.0.0.1:1", engines, nodes)._client._max_concurrency

    assert [concurrency(1, 1), concurrency(8, 1), concurrency(64, 8), concurrency(64, 1)] == [16, 2, 2, 1]


def test_a_log_is_where_the_run_directory_is_seen(tmp_path: Path) -> None:
    spec = EngineSpec(make_config(tmp_path, tmp_path), None, tmp_path / "logs")
    assert path_here(spec, 3) == tmp_path / "logs" / "rollout_engine_3.log"  # a private Ray asks for nothing
    marked = replace(spec, log_mark=mark(spec.log_dir))
    assert path_here(marked, 3) == path_here(spec, 3)
    unmark(spec.log_dir)
    elsewhere = path_here(marked, 3)
    assert elsewhere.parent.name == f"ctpo-logs-{marked.log_mark}"
    assert not list((tmp_path / "logs").iterdir())
