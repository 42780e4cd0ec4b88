"""Every limit is declared once, can be set everywhere, and bites when it is lowered."""

from __future__ import annotations

import argparse
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic.fields import FieldInfo

from ctpo_megatron.config import SandboxConfig
from ctpo_sandbox import Limits, SandboxServer, SandboxStartError
from ctpo_sandbox.records import option
from ctpo_sandbox.server import add_arguments
from tests.sandbox.conftest import small_server
from tests.sandbox.sandbox_http import HTTP, post
from tests.support.deadlines import scaled

LOWERED = Limits(
    run_timeout_s=scaled(3.0),
    cpu_s=1,
    memory_mb=128,
    file_mb=1,
    open_files=32,
    disk_mb=4,
    disk_files=16,
    threads=8,
    output_kb=2,
    request_mb=1,
)
PROBES: dict[str, tuple[dict[str, Any], str]] = {
    "run_timeout_s": (
        {"code": f"import time; time.sleep({2 * scaled(3.0) + 0.3})", "run_timeout": 2 * scaled(3.0)},
        '"status":"timeout"',
    ),
    "cpu_s": ({"code": "import time\nwhile time.process_time() < 1.3: pass"}, "SIGXCPU"),
    "memory_mb": ({"code": "x = bytearray(160 << 20)"}, "MemoryError"),
    "file_mb": ({"code": "open('f', 'wb').write(bytes(2 << 20))"}, "File too large"),
    "open_files": ({"code": "x = [open('f', 'w') for _ in range(40)]"}, "Too many open files"),
    "disk_mb": ({"code": "for i in range(6): open(f'f{i}', 'wb').write(bytes(1 << 20))"}, "No space left"),
    "disk_files": ({"code": "for i in range(20): open(f'f{i}', 'w').close()"}, "No space left"),
    "threads": (
        {"code": "import threading, time\nfor _ in range(12): threading.Thread(target=time.sleep, args=[0.2]).start()"},
        "can't start new thread",
    ),
    "output_kb": ({"code": "print('x' * 5000)"}, "[output cut: the first 2000 of 5001 bytes]"),
    "request_mb": ({"code": "input()", "stdin": "x" * (1 << 20)}, "the request body exceeds 1048576 bytes"),
}
"""Limit -> (a request that the defaults allow, what the reply says under `LOWERED`)."""

OF_A_GROUP = {"address_space_mb"}  # tests/sandbox/test_memory_groups.py
OF_THE_SERVER = {"url", "require", "slots", "warm", "request_timeout_s", "max_concurrency", "start_timeout_s"}


@pytest.fixture(scope="module")
def lowered_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SandboxServer]:
    with small_server(tmp_path_factory.mktemp("lowered"), limits=LOWERED) as server:
        yield server


def test_every_limit_is_lowered_and_probed() -> None:
    assert set(PROBES) == set(asdict(Limits())) - OF_A_GROUP
    assert all(asdict(LOWERED)[name] != asdict(Limits())[name] for name in PROBES)


def test_the_options_of_the_server_are_the_limits() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert Limits.of(parser.parse_args([])) == Limits()
    given = [text for name in PROBES for text in (option(name), str(asdict(LOWERED)[name]))]
    assert Limits.of(parser.parse_args(given)) == LOWERED


def test_the_keys_of_a_configuration_are_the_limits() -> None:
    keys = SandboxConfig.model_fields
    assert set(keys) == OF_THE_SERVER | {limit.name for limit in fields(Limits)}
    assert {limit.name: keys[limit.name].description for limit in fields(Limits)} == {
        limit.name: limit.metadata["meaning"] for limit in fields(Limits)
    }
    least = {limit.name: limit.metadata["least"] for limit in fields(Limits) if limit.metadata["least"]}
    assert least == {name: ge for name in keys for ge in bounds(keys[name]) if ge > 0}
    assert Limits.of(SandboxConfig()) == Limits(run_timeout_s=4.0)
    assert Limits.of(SandboxConfig(**asdict(LOWERED))) == LOWERED


@pytest.mark.parametrize("name", list(PROBES))
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_a_limit_that_limits_nothing_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} = {value}: a limit must be a positive number"):
        Limits.of(SimpleNamespace(**{**asdict(Limits()), name: value}))


@pytest.mark.parametrize(("name", "value"), [("memory_mb", 31), ("open_files", 3), ("disk_files", 1)])
def test_a_limit_with_which_no_program_runs_is_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} = {value}: no program runs with less than {value + 1}"):
        Limits(**{name: value})


def test_threads_that_memory_has_no_room_for_are_refused_with_both_keys() -> None:
    stacks = {threads: Limits(threads=threads).thread_stack_kb for threads in (1, 32, 33, 128, 2048)}
    assert stacks == {1: 8192, 32: 8192, 33: 7943, 128: 2048, 2048: 128}
    assert Limits(memory_mb=64, address_space_mb=4096).thread_stack_kb == 8192
    said = "memory_mb = 512 has room for the stacks of 2048; lower threads, or set memory_mb to 513"
    assert Limits(threads=2049).threads_too_many == said
    said = "address_space_mb = 70 has room for the stacks of 280; lower threads, or set address_space_mb to 75"
    assert Limits(memory_mb=64, address_space_mb=70, threads=300).threads_too_many == said
    assert Limits(threads=2049, memory_mb=513).threads_too_many == ""


def test_a_server_runs_with_the_least_of_every_limit(tmp_path: Path) -> None:
    least = {limit.name: limit.metadata["least"] for limit in fields(Limits) if limit.metadata["least"]}
    with small_server(tmp_path, limits=Limits(**least)) as server:
        assert post(server, {"code": "print(6 * 7)"}).json()["run_result"]["stdout"] == "42\n"


@pytest.mark.parametrize(("name", "kind"), [("open_files", resource.RLIMIT_NOFILE), ("threads", resource.RLIMIT_NPROC)])
def test_a_limit_beyond_the_machines_is_named(name: str, kind: int, tmp_path: Path) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard == resource.RLIM_INFINITY:
        pytest.skip("this machine has no limit")
    with pytest.raises(SandboxStartError, match=rf"{option(name)} {hard + 1}: this machine allows {hard} \(ulimit"):
        small_server(tmp_path, limits=Limits(**{name: hard + 1}))


@pytest.mark.parametrize(
    ("limit", "shown_by", "options", "said"),
    [
        ("4096", "f", (), "--file-mb 8: this machine allows 4 "),
        ("3145728", "v", ("--memory-mb", "4096"), "--memory-mb 4096: this machine allows 3072 "),
        ("3145728", "v", ("--address-space-mb", "4096"), "--address-space-mb 4096: this machine allows 3072 "),
    ],
)
def test_a_limit_beyond_the_shells_is_named(limit: str, shown_by: str, options: tuple[str, ...], said: str) -> None:
    serve = [sys.executable, "-m", "ctpo_sandbox.server", "--port", "0", *options]
    command = ["bash", "-c", f'ulimit -{shown_by} {limit} && exec "$@"', "bash", *serve]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=scaled(60))
    assert ended.returncode != 0 and f"{said}(ulimit -H{shown_by}); lower it" in ended.stderr, ended.stderr[-2000:]


def bounds(key: FieldInfo) -> Iterator[int]:
    """Lower bounds of an integer's key."""
    return (constraint.ge for constraint in key.metadata if hasattr(constraint, "ge"))


def test_health_and_metrics_show_every_limit(lowered_server: SandboxServer) -> None:
    assert lowered_server.health["limits"] == asdict(LOWERED)
    text = HTTP.get(f"{lowered_server.url}/metrics").text
    for name in PROBES:
        value = asdict(LOWERED)[name]
        assert f'ctpo_sandbox_limit{{name="{name}",node="{socket.gethostname()}"}} {float(value)}' in text


@pytest.mark.parametrize("name", list(PROBES))
def test_a_lowered_limit_bites(sandbox_server: SandboxServer, lowered_server: SandboxServer, name: str) -> None:
    if name.startswith("disk") and "limit on the files of a run together" not in lowered_server.health["enforced"]:
        pytest.skip("runs have no mounts of their own at this level")
    if name == "threads" and "own user" in lowered_server.health["missing"]:
        pytest.skip("slots have no users of their own at this level")
    request, refusal = PROBES[name]
    assert post(sandbox_server, request).json()["status"] == "success"
    assert refusal in post(lowered_server, request).text
