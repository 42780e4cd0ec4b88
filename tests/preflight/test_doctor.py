"""The doctor on this machine as it is, and on set-ups that are broken for real: each fault is a finding with a fix."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ctpo_megatron import cli
from ctpo_megatron.base.installed import is_installed
from ctpo_megatron.config import Problem, passed
from ctpo_megatron.preflight import (
    DiskNeeds,
    Gpu,
    MachineContext,
    Wanted,
    devices,
    failed,
    install_line,
    verdict,
    weight_bytes,
)
from ctpo_megatron.preflight.devices import check_collectives, check_devices, gpus
from ctpo_megatron.preflight.machine import NODE, check_machine, check_sandbox
from ctpo_megatron.preflight.nodes import compare_versions
from ctpo_megatron.preflight.packages import (
    check_imports,
    check_package,
    engine_of_cuda,
    import_troubles,
    version_of,
)
from ctpo_sandbox import Limits, start_server
from tests.support.deadlines import scaled

ENOUGH_CPU_S = 5.0
HUGE = float(1 << 60)


def installed(folder: Path, name: str, version: str) -> None:
    """A distribution, as pip leaves its metadata behind."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def machine(**wanted: object) -> dict[str, Problem]:
    return {problem.key: problem for problem in check_machine(MachineContext(Wanted(**wanted)))}  # type: ignore[arg-type]


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
    if engine_of_cuda() and isinstance(gpus(), str):  # a build for GPUs alone, and there is none
        assert status == 1 and not said["ready"], said
        assert [fix.split(";")[0] for fix in said["to_do"]] == ["a GPU"]
    else:
        assert (status, said["ready"], said["to_do"]) == (0, True, []), said
    assert seconds < ENOUGH_CPU_S
    names = {finding["name"] for finding in said["findings"]["This machine"]}
    assert {"torch", "ray", "CUDA", "memory", "open files", "disk of .", "sandbox"} <= names


def test_a_package_is_here_with_its_code_or_missing_from_an_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    installed(tmp_path, "no-such-code", "2.9.0")
    assert check_package("pyarrow", "pyarrow", "train") == passed("pyarrow", str(version_of("pyarrow")))
    broken = check_package("no-such-code", "no_such_code", "sandbox")
    assert broken.message == "2.9.0 by its metadata, but the code of no_such_code is not here"
    absent = check_package("no-such-package", "no_such_package", "train")
    assert (absent.severity, absent.message) == ("missing", "not installed")
    assert install_line([absent, broken]) == "pip install -e '.[sandbox,train]'"
    assert check_package("no-such-package", "no_such_package", "").severity == "warning"
    assert verdict([broken, absent]) == "not ready: 2 to mend: no-such-code, no-such-package"


def test_sizes_are_held_against_what_a_run_wants(tmp_path: Path) -> None:
    small = machine(
        shared_memory=str(tmp_path),
        disk=(DiskNeeds(str(tmp_path / "runs" / "x"), HUGE, HUGE),),
        host_bytes=HUGE,
    )
    disk = small[f"disk of {tmp_path}/runs/x"]
    assert disk.severity == "error" and disk.message.endswith("but one checkpoint takes 1,024 PiB")
    assert small["memory"].severity == "error"
    filled = DiskNeeds(str(tmp_path), 1.0, HUGE, "all of it", "tracking.trajectories", "none")
    enough = machine(shared_memory=str(tmp_path), disk=(filled,))
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


def test_layers_and_optimizer_need_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def named() -> set[str]:
        return {finding.key for finding in check_devices(MachineContext(Wanted(), "no nvidia-smi"))}

    assert {"layer spec", "optimizer"} <= named()
    monkeypatch.setattr(devices, "is_installed", lambda name: name != "torch" and is_installed(name))
    assert not {"layer spec", "optimizer"} & named()


def test_memory_is_held_against_the_weights_of_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for shard in range(2):
        with (tmp_path / f"model-{shard}.safetensors").open("wb") as file:
            file.truncate(1 << 42)  # takes no room
    assert weight_bytes(tmp_path) == 2 << 42
    monkeypatch.setattr("ctpo_megatron.cli.doctor.diagnose", lambda wanted: list(check_machine(MachineContext(wanted))))
    assert cli.main(["doctor", "--model", str(tmp_path)]) == 1
    assert "but weights and optimizer alone take 8192.0 GiB" in capsys.readouterr().out


def test_little_shared_memory_is_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=64 << 20, total=1 << 30, used=0))
    shared = machine(shared_memory=str(tmp_path))["/dev/shm"]
    assert (shared.severity, shared.message) == ("warning", "0.1 GiB free") and "--shm-size 2g" in shared.fix


def test_what_is_missing_comes_with_the_line_that_installs_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = [check_package(f"no-such-{extra}", "no_such_module", extra) for extra in ("train", "cpu")]
    monkeypatch.setattr("ctpo_megatron.cli.doctor.diagnose", lambda wanted: absent)
    assert cli.main(["doctor"]) == 1
    out, err = capsys.readouterr()
    assert "missing  not installed; pip install -e '.[train]'" in out
    assert "To install what is missing: pip install -e '.[cpu,train]'" in err


def test_few_open_files_and_ports_in_use_are_found(tmp_path: Path) -> None:
    """In a process of its own, whose limit can be lowered."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code = (
            "import json, resource, sys\n"
            "from ctpo_megatron.preflight import MachineContext, Wanted\n"
            "from ctpo_megatron.preflight.machine import check_machine\n"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))\n"
            f"at = ('127.0.0.1', {port}, 'the tracker prometheus'), ('127.0.0.1', 1, 'sandbox.url')\n"
            "found = check_machine(MachineContext(Wanted(ports=at[:1], servers=at)))\n"
            "print(json.dumps({p.key: (p.severity, p.message, p.fix) for p in found}))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=scaled(60)
        )
    found = json.loads(done.stdout)
    severity, _, fix = found["open files"]
    assert severity == "error" and "ulimit -n 65536" in fix
    severity, message, _ = found[f"port {port}"]
    assert severity == "error" and message.endswith("of the tracker prometheus: Address already in use")
    assert found["the tracker prometheus"][0] == "ok"
    severity, message, _ = found["sandbox.url"]
    assert severity == "error" and "does not answer" in message


def test_a_driver_is_held_against_the_cuda_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 81559, 570.86.15'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = gpus()
    assert isinstance(found, list) and found == [Gpu("NVIDIA H100 80GB HBM3", 81559 / 1024, "570.86.15")]
    old = {problem.key: problem for problem in check_devices(MachineContext(Wanted(), found, "13.0"))}
    assert old["driver"].severity == "error" and old["driver"].fix == "install a driver of branch 580 or newer"
    assert {p.key: p.severity for p in check_devices(MachineContext(Wanted(), found, "12.8"))}["driver"] == "ok"
    assert {p.key: p.severity for p in check_devices(MachineContext(Wanted(), found))}["driver"] == "warning"
    program.write_text("#!/bin/sh\necho 'NVML: Driver/library version mismatch'\nexit 18\n")
    assert "Driver/library version mismatch" in next(iter(check_devices(MachineContext(Wanted(), gpus())))).message


def test_the_sandbox_of_a_node_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(run_timeout_s=5)
    with start_server(
        slots=1, limits=limits, start_timeout_s=scaled(60), log_path=tmp_path / "log", tiers=["stdlib"]
    ) as server:
        monkeypatch.setenv("CTPO_SANDBOX_URL", server.url)
        assert check_sandbox(MachineContext(Wanted(sandbox=NODE))) == [
            passed("sandbox", f"this node's own answers at {server.url}")
        ]
    (gone,) = check_sandbox(MachineContext(Wanted(sandbox=NODE)))
    assert gone.severity == "error" and "does not answer" in gone.message
    monkeypatch.delenv("CTPO_SANDBOX_URL")
    (none,) = check_sandbox(MachineContext(Wanted(sandbox=NODE)))
    assert none.severity == "error" and "CTPO_SANDBOX_URL is not set" in none.message


def test_nodes_that_differ_are_named() -> None:
    same = [passed("python", "3.11.7 (/a)"), passed("ray", "2.60.0")]
    other = [passed("python", "3.11.7 (/b)"), passed("ray", "2.59.0")]
    differs, answered = compare_versions({"a": same, "b": other, "c": same})
    assert (differs.key, differs.severity) == ("ray", "error")
    assert differs.message == "differs between nodes: 2.60.0 on a, c; 2.59.0 on b"
    assert answered == passed("nodes", "3 answered")


def test_modules_that_raise_or_kill_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raises_at_import.py").write_text("raise OSError('libfoo.so: not found')\n")
    (tmp_path / "dies_at_import.py").write_text("import os; os._exit(3)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert import_troubles(["raises_at_import", "json"]) == {
        "raises_at_import": "OSError: libfoo.so: not found",
        "json": "",
    }
    assert "exit status 3" in import_troubles(["dies_at_import"])["dies_at_import"]


@pytest.mark.slow
def test_everything_imports_and_ranks_meet() -> None:
    assert failed(check_imports(MachineContext(Wanted()))) == []
    (met,) = check_collectives(MachineContext(Wanted()))
    assert met.severity == "ok" and met.message.startswith("2 ranks: an all-reduce of 16 MiB took ")
