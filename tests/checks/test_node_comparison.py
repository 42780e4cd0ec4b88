"""What a Ray node must share with the trainer's before an engine starts there: all that differs is named at once."""

from __future__ import annotations

import importlib.metadata
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from ctpo_megatron.checks import NodeComparison
from tests.engines.pool_helpers import make_config


@pytest.fixture
def here(tmp_path: Path) -> NodeComparison:
    """Of a model with a tokenizer, and of a folder of users' code."""
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / name).write_text("{}")
    return NodeComparison.of(make_config(model, tmp_path, sections={"extensions": {"path": [str(tmp_path)]}}))


def test_all_that_differs_is_listed(here: NodeComparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CTPO_SANDBOX_URL", raising=False)
    assert here(True, False) == []
    assert {"python", "torch", "ray"} < here.versions.keys() and len(here.versions["code of ctpo-megatron"]) == 12
    (tmp_path / "model" / "tokenizer.json").write_text("another")
    (tmp_path / "model" / "chat_template.jinja").touch()
    (tmp_path / "model" / "model.safetensors").write_text("of another step")  # the trainer sends the weights
    ray = importlib.metadata.version("ray")
    versions = {name: text for name, text in here.versions.items() if name != "torch"} | {"ray": "0.1", "vllm": "0.1"}
    there = replace(here, versions=versions, folders=(*here.folders, "/nowhere"))
    differing = [f"ray is {ray}, and 0.1 where the trainer runs"]
    assert set(differing) < set(there(False, True))
    assert [line for line in there(True, True) if "vllm" not in line] == [
        *differing,
        f"torch is {importlib.metadata.version('torch')}, and missing where the trainer runs",
        f"chat_template.jinja, tokenizer.json in {here.model_path} (model.path): not the same files as where the "
        "trainer runs",
        "has no folder /nowhere (extensions.path)",
        "this node has no sandbox: CTPO_SANDBOX_URL is not set for its Ray processes. Start the node with "
        "`python -m ctpo_launchers.node`, or set sandbox.url",
    ]
    assert len(there(False, True)) == 3  # without an engine its versions suffice
    gone = replace(here, model_path=str(tmp_path / "gone"))
    assert gone(True, False) == [
        f"has no model at {tmp_path / 'gone'} (model.path): every node with engines needs it at that absolute path"
    ]


def test_a_nodes_sandbox_is_asked(here: NodeComparison, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    monkeypatch.setenv("CTPO_SANDBOX_URL", url)
    (problem,) = here(True, True)
    assert f"the sandbox {url} does not answer" in problem and "(CTPO_SANDBOX_URL)" in problem
    token = tmp_path / "token"
    token.touch()
    token.chmod(0o644)
    monkeypatch.setenv("SANDBOX_TOKEN_FILE", str(token))
    (problem,) = here(True, True)
    assert "can be read or written by other users" in problem
