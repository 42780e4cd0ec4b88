"""Which node this is, from flags or from Slurm, whose commands are scripts here."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import pytest

from ctpo_launchers import launch, slurm
from ctpo_launchers.job import NodeJob, address_of_interface, free_ports, interface_of

HOSTS = {"n0": "127.0.0.2", "n1": "127.0.0.3"}


def flags(**given: object) -> argparse.Namespace:
    names = ("nodes", "node_rank", "head", "address", "interface", "port")
    return argparse.Namespace(**(dict.fromkeys(names) | given))


@pytest.fixture
def in_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task on the second of two nodes whose names only Slurm knows."""
    answers = " ".join(f"{name}) echo NodeName={name} NodeAddr={address} ;;" for name, address in HOSTS.items())
    show = f'case "$2" in hostnames) printf "n0\\nn1\\n" ;; *) case "$4" in {answers} esac ;; esac'
    for name, body in {"scontrol": show, "squeue": "echo 2030-01-02T03:04:05"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    told = {"JOB_ID": "1234", "NODEID": "1", "JOB_NODELIST": "n[0-1]", "STEP_NODELIST": "n[0-1]"}
    for name, value in told.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    monkeypatch.delenv(slurm.HOSTS_VARIABLE, raising=False)


@pytest.mark.usefixtures("in_slurm")
def test_a_task_of_slurm_needs_no_flags() -> None:
    job = NodeJob.of(flags())
    assert (job.rank, job.nodes, job.hosts, job.name(1)) == (1, 2, ("n0", "n1"), "node 1 (n1)")
    assert (job.head, job.address, job.interface) == ("127.0.0.2", "127.0.0.3", "lo")
    assert job.port == 29400 + 16 * 34
    assert slurm.job_end() == time.mktime((2030, 1, 2, 3, 4, 5, 0, 0, -1))


@pytest.mark.usefixtures("in_slurm")
def test_a_container_without_scontrol_takes_the_names_from_the_batch_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ValueError, match="export CTPO_HOSTS="):
        NodeJob.of(flags())
    monkeypatch.setenv(slurm.HOSTS_VARIABLE, "127.0.0.2,127.0.0.3")
    job = NodeJob.of(flags())
    assert (job.rank, job.head) == (1, "127.0.0.2")


def test_one_node_needs_nothing() -> None:
    assert (NodeJob.of(flags()).nodes, NodeJob.of(flags()).rank) == (1, 0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nodes": 2}, "need --node-rank"),
        ({"nodes": 2, "node_rank": 2, "head": "127.0.0.2"}, "--node-rank 2 is not one of the 2 nodes"),
        ({"nodes": 2, "node_rank": 1, "head": "no.such.host.invalid"}, "has no address here"),
        ({"nodes": 2, "node_rank": 1, "head": "127.0.0.2", "interface": "nope0"}, "there are .*lo"),
        ({"nodes": 2, "node_rank": 1, "head": "127.0.0.2", "address": "host"}, "--address host is no IP address"),
        ({"nodes": 2, "node_rank": 1, "head": "127.0.0.2", "port": 65534}, "--port 65534 is not one of 1 to 65533"),
    ],
)
def test_wrong_flags_are_named(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NodeJob.of(flags(**given))


def test_addresses_and_interfaces_of_this_machine() -> None:
    assert interface_of("127.0.0.77") == "lo" and interface_of("203.0.113.9") is None
    assert address_of_interface("lo") == "127.0.0.1"
    ports = free_ports("127.0.0.9", 23000, 3)
    assert len(set(ports)) == 3 and all(23000 <= port < 32768 for port in ports)
    with pytest.raises(OSError, match="give another --port"):
        free_ports("127.0.0.9", 65530, 20)


def test_the_words_of_launch_survive_the_way_to_its_environment() -> None:
    parser = argparse.ArgumentParser()
    launch.add_arguments(parser)
    words = ["my.yaml", "--nodes", "2", "--dry-run", "--cluster", "c.yaml", "run.name=a b", "policy.dtype=bfloat16"]
    args, args.unknown = parser.parse_known_args(words)
    again = parser.parse_args(launch.as_words(args))
    assert again.overrides == ["run.name=a b", "policy.dtype=bfloat16"] and (again.nodes, again.dry_run) == (2, True)
    assert (again.config, again.cluster, again.executor) == ("my.yaml", "c.yaml", "slurm")
