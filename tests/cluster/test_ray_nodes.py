"""A fleet on two Ray nodes: the head here, the engine on a worker with a network, processes and /dev/shm of its own.

The tests share one fleet and follow each other: what the last one does to the cluster is the worst.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.cluster.driver import Driver, Refused
from tests.cluster.nodes import Node, TwoNodes, missing, sandbox_of_worker, two_nodes
from tests.support.deadlines import scaled

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]
OUTAGE_S = 20.0
PROMPTS = 96
"""Are sampled for several times as long as a test waits before it breaks something."""


class Set:
    """The cluster, its worker and the fleet's driver."""

    def __init__(self, cluster: TwoNodes, sandbox: Node, driver: Driver) -> None:
        self.cluster, self.sandbox, self.driver = cluster, sandbox, driver
        self.run = cluster.folder / "test"
        self.run.mkdir()
        self.worker = self.start_worker(hidden=[self.run])

    def start_worker(self, hidden: list[Path]) -> Node:
        return self.cluster.start_worker(environment=self.sandbox.environment, hidden=hidden)

    @property
    def log(self) -> str:
        """The engine's, as the run directory has it."""
        path = self.run / "logs" / "rollout_engine_0.log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def logs_of_the_node(self) -> list[Path]:
        """Of engines that do not see the run directory."""
        return list(self.cluster.folder.glob("worker-tmp/ctpo-logs-*/*"))

    def engine(self) -> psutil.Process:
        [process] = self.worker.processes("ray::RolloutEngine")
        return process

    def say(self, text: str) -> None:
        """Let the engine write to its log."""
        with open(f"/proc/{self.engine().pid}/fd/2", "a") as log:
            log.write(f"{text}\n")


@pytest.fixture(scope="module")
def nodes() -> Iterator[Set]:
    """An engine of the tiny model on the worker, which does not see the run directory; tools run in its sandbox."""
    with two_nodes() as cluster, sandbox_of_worker(cluster) as sandbox:
        driver = Driver(cluster.driver_environment, cluster.folder / "driver.log")
        try:
            everything = Set(cluster, sandbox, driver)
            options: dict[str, Any] = {
                "sections": {"cluster": {"nodes": 2, "engine_placement": "packed"}},
                "tools": [{"name": "python"}],
            }
            options |= {"start_timeout_s": scaled(240), "weights": {"timeout_s": scaled(60)}}
            with pytest.raises(Refused, match="no place for 9 engines of 1 CPU and 0 GPU each"):
                driver.call("start", root=str(cluster.folder), sandbox_url=None, engines=9, **options)
            seconds = driver.call("start", root=str(cluster.folder), sandbox_url=None, **options)
            print(f"the engine serves after {seconds:.1f} s")
            yield everything
        finally:
            driver.close()
            print((cluster.folder / "driver.log").read_text()[-3000:])


def check(outcome: dict[str, Any], groups: int) -> None:
    """All groups, by the weights sent last, with tool calls that the worker's sandbox answered."""
    assert outcome["groups"] == groups
    assert outcome["versions"] == [outcome["version"]]
    assert outcome["error"] <= 1e-4
    assert "success" in outcome["calls"] and set(outcome["calls"]) <= {"success", "parse_error"}


def wait_for(what: Any, timeout_s: float) -> float:
    """Seconds until `what()` is true."""
    started = time.monotonic()
    while not what():
        assert time.monotonic() < started + scaled(timeout_s)
        time.sleep(0.2)
    return time.monotonic() - started


def test_an_engine_on_another_node_samples(nodes: Set) -> None:
    assert nodes.driver.call("engines") == [f"rollout engine 0 on {nodes.cluster.cable.there}"]
    assert not nodes.cluster.head.processes("ray::RolloutEngine")
    check(nodes.driver.call("generate", prompts=6, step=1), 6)
    nodes.say("still well")
    assert [log.read_text().count("still well") for log in nodes.logs_of_the_node] == [1]


def test_an_engine_that_is_killed_is_replaced(nodes: Set) -> None:
    """Before any update, so that the new one has the weights of the others."""
    answer = nodes.driver.begin("generate", prompts=PROMPTS, step=2)
    time.sleep(0.5)
    nodes.engine().kill()
    began = time.monotonic()
    outcome = answer()
    print(f"engine killed: all groups {time.monotonic() - began:.1f} s later")
    check(outcome, PROMPTS)
    assert outcome["stats"]["engine_restarts"] == 1
    assert len(nodes.logs_of_the_node) == 2  # that of the killed engine stays
    said = (nodes.cluster.folder / "driver.log").read_text()
    assert f"; log: {nodes.cluster.cable.there}:{nodes.cluster.folder}" in said and "/ctpo-logs-" in said, said[-3000:]


def test_nothing_is_lost_while_the_network_is_gone(nodes: Set) -> None:
    answer = nodes.driver.begin("generate", prompts=PROMPTS, step=3)
    time.sleep(0.5)
    nodes.cluster.cable.unplug()
    nodes.cluster.cable.reset()
    time.sleep(OUTAGE_S)
    nodes.cluster.cable.plug_in()
    began = time.monotonic()
    outcome = answer()
    print(f"network back after {OUTAGE_S:g} s: all groups {time.monotonic() - began:.1f} s later, {outcome['stats']}")
    check(outcome, PROMPTS)
    assert outcome["seconds"] > OUTAGE_S
    assert outcome["stats"]["engine_restarts"] == 0


def test_a_sandbox_that_is_killed_costs_no_group(nodes: Set) -> None:
    answer = nodes.driver.begin("generate", prompts=PROMPTS, step=4)
    time.sleep(0.2)
    [server] = [process for process in nodes.sandbox.processes("ctpo_sandbox.server") if "--port" in process.cmdline()]
    server.kill()
    began = time.monotonic()
    outcome = answer()
    print(f"sandbox killed: all groups {time.monotonic() - began:.1f} s later, retries {outcome['stats']}")
    check(outcome, PROMPTS)
    assert outcome["stats"]["engine_restarts"] == 0


def test_a_worker_node_that_dies_gives_its_engine_to_its_successor(nodes: Set) -> None:
    """Which sees the run directory."""
    answer = nodes.driver.begin("generate", prompts=PROMPTS, step=5)
    time.sleep(0.5)
    nodes.worker.kill()
    began = time.monotonic()
    nodes.worker = nodes.start_worker(hidden=[])
    outcome = answer()
    print(f"Ray node killed: all groups {time.monotonic() - began:.1f} s later, {outcome['stats']}")
    check(outcome, PROMPTS)
    assert outcome["stats"]["engine_restarts"] == 1
    nodes.say("in the run directory")
    assert "in the run directory" in nodes.log


def test_an_engine_on_another_node_is_updated(nodes: Set) -> None:
    seconds = nodes.driver.call("sync", scale=0.02)
    print(f"an update takes {seconds:.2f} s")
    check(nodes.driver.call("generate", prompts=6, step=6), 6)


def test_a_node_that_is_cut_off_for_good_gives_its_engine_to_another(nodes: Set) -> None:
    """Silently: no connection is broken. The only engine with the weights is gone, and its successor has none."""
    with sandbox_of_worker(nodes.cluster, here=True) as sandbox:
        nodes.cluster.start_worker(environment=sandbox.environment, here=True)
        answer = nodes.driver.begin("generate", prompts=PROMPTS, step=7)
        time.sleep(0.5)
        nodes.cluster.cable.unplug()
        began = time.monotonic()
        with pytest.raises(Refused, match="no engine is left that has weights 1"):
            answer()
        print(f"Ray node cut off: noticed {time.monotonic() - began:.1f} s later")
        here = [f"rollout engine 0 on {nodes.cluster.cable.here}"]
        wait_for(lambda: nodes.driver.call("engines") == here, 240)
