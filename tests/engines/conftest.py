"""One Ray and the fleets that all tests share; a test that breaks an engine waits until the fleet has mended it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ctpo_megatron.engines import RayRuntime
from tests.engines.pool_helpers import Stage
from tests.support.deadlines import scaled

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}


@pytest.fixture(scope="session")
def shared_ray() -> Iterator[None]:
    """Ray with a processor for each fleet that is kept, and two; a fleet that finds it does not start its own."""
    runtime = RayRuntime(cpus=4)
    try:
        runtime.started.result(scaled(120))
        yield
    finally:
        runtime.close()


@contextmanager
def running(stage: Stage) -> Iterator[Stage]:
    try:
        stage.fleet.wait_ready()
        yield stage
    finally:
        stage.close()


@pytest.fixture(scope="session")
def stage(shared_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A dense model with the built-in parser, and the built-in environment but for an agent's prompts."""
    with running(Stage(tmp_path_factory.mktemp("fleet"), environment="agent_parts:Both")) as stage:
        yield stage


@pytest.fixture(scope="session")
def users_stage(shared_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A mixture of experts; tools, parser and environment come from a file outside the package.

    Its run has steps to trace.
    """
    root = tmp_path_factory.mktemp("users")
    parts: dict[str, Any] = {
        "tools": [{"name": "user_parts:ScriptedPython", "arguments": {"flag": str(root / "flag")}}, "user_parts:Adder"],
        "tool_parser": {"name": "user_parts:TaggedParser", "arguments": {"tag": "result"}},
        "environment": {"name": "user_parts:Either", "arguments": {"times": 3}},
    }
    run = {"name": "test", "root": str(root), "steps": 4, "seed": 7, "profile_steps": [3, 4]}
    with running(Stage(root, EXPERTS, sections={"run": run}, **parts)) as stage:
        yield stage


@pytest.fixture(scope="session")
def half_stage(shared_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """In float16."""
    with running(Stage(tmp_path_factory.mktemp("half"), sections={"policy": {"dtype": "float16"}})) as stage:
        yield stage
