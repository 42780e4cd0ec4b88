"""Libraries that programs may expect and the sandbox lacks are named before a run, whoever runs the sandbox."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator

import pytest

from ctpo_megatron.checks import NODE, check_libraries, check_sandbox, check_start
from ctpo_megatron.config import Job, RolloutConfig, SandboxConfig, load_with_sources
from ctpo_sandbox import SandboxServer
from tests.support.deadlines import scaled

HIDDEN = ("scipy", "pandas")
SERVER = f"""
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {HIDDEN} else found(name, package)
from ctpo_sandbox.server import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server whose environment has neither scipy nor pandas."""
    command = [sys.executable, "-c", SERVER, "--slots", "1", "--require", "none", "--tiers", "stdlib"]
    with SandboxServer(command, tmp_path_factory.mktemp("bare") / "log", scaled(60)) as server:
        yield server.url


def test_a_server_that_runs_is_asked(bare: str) -> None:
    (problem,) = check_libraries(SandboxConfig(url=bare), RolloutConfig())
    assert problem.severity == "warning" and f"{bare} lacks pandas, scipy" in str(problem)
    assert "ctpo-megatron[sandbox-math]" in problem.fix
    assert len(check_libraries(SandboxConfig(url=f"{bare},{bare}"), RolloutConfig())) == 2
    assert check_libraries(SandboxConfig(url=bare), RolloutConfig(tools=())) == []


def test_the_server_of_a_node_is_asked(bare: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CTPO_SANDBOX_URL", bare)
    (problem,) = check_libraries(SandboxConfig(), RolloutConfig())
    assert "lacks pandas, scipy" in str(problem)
    answers, missing = check_sandbox(NODE)
    assert answers.severity == "ok" and missing.severity == "warning" and "lacks pandas, scipy" in missing.message


def test_our_own_server_will_have_what_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_libraries(SandboxConfig(), RolloutConfig()) == []
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in HIDDEN else found(name, *rest))
    (problem,) = check_libraries(SandboxConfig(), RolloutConfig())
    assert "the sandbox that a run starts lacks pandas, scipy" in str(problem)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://", "no address"])
def test_a_server_that_does_not_answer_is_named(url: str) -> None:
    (problem,) = check_libraries(SandboxConfig(url=url), RolloutConfig())
    assert problem.severity == "warning" and url in str(problem) and "does not answer" in str(problem)


def test_the_start_of_a_run_names_them(bare: str) -> None:
    config, sources = load_with_sources("configs/quickstart.yaml", [f"sandbox.url={bare}"])
    for disk in (True, False):  # other ranks than zero
        found = check_start(config, sources, Job(1), disk=disk)
        assert len([problem for problem in found if f"{bare} lacks pandas, scipy" in str(problem)]) == disk
