"""The real bundle on a machine as bare as the one it is for, but without a GPU: Python 3.12 and torch 2.11.

Takes about ten CPU-minutes, 3 GB of downloads and 9 GB of disk, which are freed at the end.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.gpu_bundle.__main__ import HERE
from benchmarks.gpu_bundle.contents import Contents
from tests.cuda_environment.install import ROOT, build_driver
from tests.support import children
from tests.support.task import SMALL_TASK, sft_file, task_files, task_folder

pytestmark = [pytest.mark.cuda_environment, pytest.mark.xdist_group("bundle"), pytest.mark.timeout(3600)]

CONTENTS = Contents.read(HERE / "contents.yaml")
PINS = {"torch": "2.11.0", "triton": "3.6.0", "torchvision": "0.26.0", "torchaudio": "2.11.0"}
PINS |= {"transformers": "5.17.0", "tokenizers": "0.23.2", "huggingface-hub": "1.33.0", "numpy": "2.5.2"}
"""What the machine holds in versions that are not those of the lock."""
LIMIT_MIB = 52
MODULES = (
    "vllm.cumem_allocator",
    "vllm.device_allocator.cumem",
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.distributed.weight_transfer.nccl_engine",
    "vllm.distributed.weight_transfer.ipc_engine",
    "vllm.distributed.device_communicators.pynccl",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.attention.backends.triton_attn",
    "ctpo_megatron.train",
    "ctpo_megatron.engines.weights.receiver",
    "benchmarks.gpu_first_hour.engine",
    "benchmarks.gpu_first_hour.policy",
)


class Machine(NamedTuple):
    """Its interpreter, folder of the unpacked bundle, and the environment of a process there."""

    python: Path
    bundle: Path
    target: Path
    environment: dict[str, str]

    def run(self, *arguments: str, deadline_s: float = 280) -> subprocess.CompletedProcess[str]:
        command = [str(self.python), *arguments]
        return children.run(command, deadline_s=deadline_s, directory=ROOT, environment=self.environment)

    def probe(self, name: str, *arguments: str) -> Any:
        done = self.run("-m", "tests.cuda_environment.probes", name, *arguments)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])


def interpreter() -> str:
    """A Python of the version that the bundle is for; skips where there is none."""
    for python in (sys.executable, shutil.which(f"python{CONTENTS.python}")):
        asked = [python or "false", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        if subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() == CONTENTS.python:
            return str(python)
    pytest.skip(f"no python{CONTENTS.python} runs here")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.policy import models

    folder = tmp_path_factory.mktemp("models") / "tiny"
    models.build("qwen3-tied", folder, layers=2)
    return folder


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Machine]:
    folder = tmp_path_factory.mktemp("machine")
    python, target, bundle = folder / "venv/bin/python", folder / "site", folder / "bundle"
    options = ["--arch", "sm_90", "--limit-mib", str(LIMIT_MIB), "--model", str(model)]
    packages = [f"{name}=={PINS[name]}" if name in PINS else name for name in CONTENTS.machine]
    commands = [
        [sys.executable, "-m", "benchmarks.gpu_bundle", str(bundle), *options],
        [interpreter(), "-m", "venv", str(folder / "venv")],
        [str(python), "-m", "pip", "install", "--quiet", *packages],
        ["sh", str(bundle / "unpack.sh"), str(target)],
    ]
    environment = os.environ | {"PYTHON": str(python)}
    for command in commands:
        done = children.run(command, deadline_s=1200, directory=ROOT, environment=environment)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "warning" not in done.stderr, done.stderr
    build_driver(folder / "driver", next((folder / "venv").glob("lib/python*/site-packages")))
    paths = [ROOT, *(ROOT / name for name in ("answers", "kernels", "sandbox", "launchers")), target]
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "LD_LIBRARY_PATH": str(folder / "driver")}
    yield Machine(python, bundle, target, environment)
    shutil.rmtree(folder)


def test_both_archives_can_be_carried_and_every_rule_leaves_something_out(machine: Machine, model: Path) -> None:
    told = json.loads((machine.bundle / "manifest.json").read_text())
    sizes = {archive["name"]: archive["bytes"] / 2**20 for archive in told["archives"]}
    assert sizes.keys() == {"engine.tar.xz", "ray.tar.xz"} and max(sizes.values()) <= LIMIT_MIB
    assert [pattern for pattern, told in told["left_out"].items() if not told.get("files")] == []
    assert (machine.target / "models" / model.name / "config.json").is_file()


def test_every_library_loads(machine: Machine) -> None:
    seen = machine.probe("libraries", str(machine.target))
    assert seen["refused"] == {} and seen["loaded"] > 30


def test_vllm_registers_its_operators(machine: Machine) -> None:
    seen = machine.probe("operators")
    assert sum(count for name, count in seen.items() if name.startswith("_C")) == 143
    assert seen["_vllm_fa3_C"] == 2


def test_nvidias_tool_finds_the_same_code_for_the_gpu_as_in_the_wheel(machine: Machine, tmp_path: Path) -> None:
    """cuobjdump, which Triton brings, reads pruned libraries; what it extracts for the architecture is unchanged."""
    program = next(machine.python.parents[1].glob("lib/python*/site-packages/triton/backends/nvidia/bin/cuobjdump"))
    name = "vllm/_C_stable_libtorch.abi3.so"
    version = json.loads((machine.bundle / "manifest.json").read_text())["packages"]["vllm"]
    (wheel,) = (ROOT / "build" / "gpu_bundle").glob(f"vllm-{version}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(name, tmp_path)
    codes, others = [], []
    for index, library in enumerate((tmp_path / name, machine.target / name)):
        (folder := tmp_path / str(index)).mkdir()
        done = children.run([str(program), "-xelf", "sm_90", str(library)], deadline_s=200, directory=folder)
        assert done.returncode == 0, done.stderr
        codes.append(Counter(path.read_bytes() for path in folder.iterdir()))
        listed = children.run([str(program), "--list-elf", str(library)], deadline_s=200).stdout
        others.append(len(re.findall(r"\.sm_(?!90)", listed)))
    assert codes[0] == codes[1] and codes[0].total() > 50
    assert others[1] < others[0] / 5


@pytest.mark.parametrize("module", MODULES)
def test_what_a_ring_needs_can_be_imported(machine: Machine, module: str) -> None:
    assert machine.probe("imported", module) == module


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_vllm_takes_the_arguments_of_our_engines(machine: Machine, runner: str) -> None:
    model = machine.target / "models" / "tiny"
    overrides = ["rollout.engine.dtype=bfloat16", f"rollout.engine.model_runner={runner}"]
    seen = machine.probe("engine", "configs/quickstart.yaml", str(model), "colocated", *overrides)
    assert (seen["cuda"], seen["transport"], seen["sleep"]) == (True, "ipc", True)
    assert seen["v2 runner"] == (runner == "v2")


def test_the_command_line_lacks_a_gpu_and_figures_alone(machine: Machine) -> None:
    task = task_folder(*SMALL_TASK)
    settings = [*task_files(task), sft_file(task), "--dry-run", "--cuda"]
    done = machine.run("-m", "ctpo_megatron.cli", "train", "configs/quickstart.yaml", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    done = machine.run("-m", "ctpo_megatron.cli", "doctor", "--deep")
    assert "not ready: 2 problems: vl-convert-python, vllm\n" in done.stdout, done.stdout
    done = machine.run("-m", "pytest", "-m", "gpu", "--collect-only", "-q")
    assert done.returncode == 0, done.stdout


def test_the_ring_runs_as_far_as_the_device_of_the_engine(machine: Machine, tmp_path: Path) -> None:
    """Data, sandbox, Ray, scorers and supervised steps come before it."""
    task = tmp_path / "toolmath"
    assert machine.run("-m", "examples.toolmath", str(task), *SMALL_TASK).returncode == 0
    settings = [*task_files(task), sft_file(task), "sft.steps=10"]
    settings += [f"run.root={tmp_path}", "run.steps=1", "tracking.report=false"]
    done = machine.run("-m", "ctpo_megatron.cli", "train", "configs/quickstart.yaml", *settings)
    log = (tmp_path / "quickstart" / "logs" / "train.log").read_text()
    assert "[sft] 10/10" in log and "[rl] started" in log, done.stdout + done.stderr
    assert "rollout engine 0 did not start: RuntimeError: Device string must not be empty" in done.stderr
