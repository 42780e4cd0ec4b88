"""The kernels as a distribution of their own: installs, runs the README's examples, shares no file with the root."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.deadlines import scaled

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels"
# An environment with torch alone: the project and its trainer's libraries are not to be found.
ALONE = """
import sys
for name in ("ctpo_megatron", "megatron", "triton", "vllm", "ray", "transformers"):
    sys.modules[name] = None
import ctpo_kernels, json
print(json.dumps([ctpo_kernels.__file__, ctpo_kernels.__version__]))
"""


def examples() -> str:
    """All Python of the README, one block after the other."""
    blocks = re.findall(r"```python\n(.*?)```", (KERNELS / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 3
    return "\n".join(blocks)


def run(*command: str, **environment: str) -> str:
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=scaled(280), check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip has installed a copy of kernels/ with what is here."""
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(KERNELS, folder / "kernels", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-compile")
    run(*pip, "--target", str(folder / "site"), str(folder / "kernels"))
    return folder / "site"


def test_the_examples_run_with_torch_alone(installed: Path) -> None:
    out = run(sys.executable, "-c", ALONE + examples(), PYTHONPATH=str(installed))
    place, version = json.loads(out.splitlines()[0])
    assert Path(place).is_relative_to(installed)
    assert (installed / f"ctpo_kernels-{version}.dist-info").is_dir()


def test_no_file_belongs_to_both_distributions(installed: Path) -> None:
    assert {path.name.split("-")[0] for path in installed.iterdir()} == {"ctpo_kernels"}
    code = (
        "import json, distutils.core; root = distutils.core.run_setup('setup.py', stop_after='init'); "
        "print(json.dumps([root.packages, root.package_dir]))"
    )
    done = run(sys.executable, "-c", f"import os, setuptools; os.chdir({str(ROOT)!r}); {code}")
    packages, folders = json.loads(done)
    assert "ctpo_megatron" in packages
    assert not [name for name in (*packages, *folders) if name.split(".")[0] == "ctpo_kernels"]


def test_what_the_distribution_asks_for(installed: Path) -> None:
    (metadata,) = installed.glob("*.dist-info/METADATA")
    fields = re.findall(r"^(\S+): (.*)$", metadata.read_text(encoding="utf-8").split("\n\n")[0], re.MULTILINE)
    required = [value for name, value in fields if name == "Requires-Dist" and "extra ==" not in value]
    assert required == ["torch>=2.10"]
    assert ("License-Expression", "Apache-2.0") in fields
    assert {value for name, value in fields if name == "License-File"} == {"LICENSE", "NOTICE"}


@pytest.mark.slow
def test_an_empty_environment(tmp_path: Path) -> None:
    """From the package index, dependencies included."""
    run(sys.executable, "-m", "venv", str(tmp_path / "venv"))
    python = str(tmp_path / "venv" / "bin" / "python")
    run(python, "-m", "pip", "install", "--quiet", str(KERNELS), PYTHONPATH="")
    run(python, "-I", "-c", ALONE + examples())
