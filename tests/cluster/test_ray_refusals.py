"""Clusters on which no engine may start: every refusal, by real Ray nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.driver import Driver, Refused
from tests.cluster.nodes import TwoNodes, missing, two_nodes
from tests.engines.tiny_model import build_tiny_model
from tests.support.deadlines import scaled

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]
LIMIT = scaled(20)
TWO = {"cluster": {"nodes": 2}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[TwoNodes]:
    """The worker has another transformers, does not see the model, and has no sandbox."""
    with two_nodes() as cluster:
        build_tiny_model(cluster.folder / "model")
        other = cluster.folder / "site" / "transformers-0.0.1.dist-info"
        other.mkdir(parents=True)
        (other / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 0.0.1\n")
        cluster.start_worker(environment={"PYTHONPATH": str(other.parent)}, hidden=[cluster.folder / "model"])
        yield cluster


@pytest.fixture(scope="module")
def driver(cluster: TwoNodes) -> Iterator[Driver]:
    driver = Driver(cluster.driver_environment, cluster.folder / "driver.log")
    try:
        yield driver
    finally:
        driver.close()


def refusal(driver: Driver, cluster: TwoNodes, **rollout: Any) -> str:
    settings = {"start_timeout_s": LIMIT, "sections": TWO} | rollout
    return str(driver.call("refusal", model=str(cluster.folder / "model"), root=str(cluster.folder), **settings))


def test_all_that_is_wrong_with_a_node_is_said_at_once(driver: Driver, cluster: TwoNodes) -> None:
    said = refusal(driver, cluster, sandbox_url=None)
    there = cluster.cable.there
    assert "3 problems of the Ray nodes:" in said
    assert f"{there}: transformers is 0.0.1, and " in said
    assert f"{there}: has no model at {cluster.folder / 'model'} (model.path)" in said
    assert f"{there}: this node has no sandbox: CTPO_SANDBOX_URL is not set for its Ray processes" in said
    assert f"{cluster.cable.here}:" not in said  # the head has no processor for an engine, and needs no sandbox
    assert not [node for node in cluster.nodes if node.processes("ray::RolloutEngine")]


@pytest.mark.parametrize("secret", ["another", None])
def test_a_driver_without_the_token_stays_outside(cluster: TwoNodes, tmp_path: Path, secret: str | None) -> None:
    environment = {"RAY_AUTH_MODE": "disabled"}
    if secret is not None:
        token = tmp_path / "token"
        token.touch(0o600)
        token.write_text(secret)
        environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    driver = Driver(cluster.driver_environment | environment, cluster.folder / "outsider.log")
    try:
        said = refusal(driver, cluster, sections={"cluster": {"nodes": 1}} if secret is None else TWO)
        assert "cannot join the Ray cluster" in said and "token" in said
    except Refused as error:
        pytest.fail(str(error))
    finally:
        driver.close()
