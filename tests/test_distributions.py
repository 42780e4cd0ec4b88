"""What a release publishes: sdists and wheels of its distributions, whole, and at work in a bare environment."""

from __future__ import annotations

import importlib.metadata
import os
import re
import runpy
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import setuptools
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ctpo_megatron import __version__
from ctpo_megatron.cli.errors import _EXTRAS
from ctpo_megatron.tracking import PositionsWriter
from tests.releases.test_stored_runs import ARCHIVES, unpacked
from tests.report.test_paper_figures import drawn
from tests.support.deadlines import scaled
from tests.support.ranks import prefork
from tests.support.task import SMALL_TASK, sft_file, task_files, task_folder
from tests.test_architecture import imports_of, modules_of, ours, package_of
from tests.tracking.synthetic_run import write_run

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"ctpo_megatron": ".", "ctpo_answers": "answers", "ctpo_kernels": "kernels"}
"""Distribution -> the folder that it is built from."""
PACKAGES = {
    "ctpo_megatron": {
        "ctpo_megatron/": "ctpo_megatron/",
        "configs/": "ctpo_megatron/configs/",
        "sandbox/ctpo_sandbox/": "ctpo_sandbox/",
        "launchers/ctpo_launchers/": "ctpo_launchers/",
    },
    "ctpo_answers": {"answers/ctpo_answers/": "ctpo_answers/"},
    "ctpo_kernels": {"kernels/ctpo_kernels/": "ctpo_kernels/"},
}
"""Distribution -> folders of the checkout, and where they are installed."""
SDIST = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
# Without a registry: setuptools is here.
WHEEL = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir")


def run(*command: str | Path, cwd: Path, status: int = 0, path: str = "") -> str:
    """Output of a command, errors included, which has to end with `status`."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=scaled(280),
    )
    assert done.returncode == status, done.stdout
    return done.stdout


def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a checkout of git")
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdists, and the wheels that were built from them."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    for place in FOLDERS.values():
        run(sys.executable, "-c", SDIST, folder, cwd=source / place)
    run(*WHEEL, folder, *folder.glob("*.tar.gz"), cwd=folder)
    return folder


def test_distributions_of_one_version(built: Path) -> None:
    names = {path.name for path in built.iterdir() if path.is_file()}
    sdists = {f"{name}-{__version__}.tar.gz" for name in FOLDERS}
    assert names == sdists | {f"{name}-{__version__}-py3-none-any.whl" for name in FOLDERS}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_wheel_has_every_file_of_its_packages_and_nothing_else(built: Path, name: str) -> None:
    expected = {
        installed + file.removeprefix(folder)
        for folder, installed in PACKAGES[name].items()
        for file in tracked()
        if file.startswith(folder)
    }
    with zipfile.ZipFile(next(built.glob(f"{name}-*.whl"))) as wheel:
        found = {file for file in wheel.namelist() if ".dist-info/" not in file}
        licences = {Path(file).name for file in wheel.namelist() if "/licenses/" in file}
    assert found == expected
    assert licences == {"LICENSE", "NOTICE"}


@pytest.mark.parametrize("name", FOLDERS)
def test_an_sdist_holds_no_more_than_the_checkout(built: Path, name: str) -> None:
    with tarfile.open(next(built.glob(f"{name}-*.tar.gz"))) as sdist:
        files = {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()}
    made = {file for file in files if ".egg-info/" in file or file in ("PKG-INFO", "setup.cfg")}
    place = FOLDERS[name].strip(".")
    assert {f"{place}/{file}".lstrip("/") for file in files - made} <= set(tracked())


def test_a_wheel_finds_its_own_configurations(built: Path, tmp_path: Path) -> None:
    """Not those of a folder `configs` that another package has installed next to it."""
    for wheel in built.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (tmp_path / "site" / "configs").mkdir()
    (tmp_path / "site" / "configs" / "quickstart.yaml").write_text("run: {name: of_another_package}\n")
    program = "from ctpo_megatron.config import load_config; print(load_config('quickstart').run.name)"
    found = run(sys.executable, "-c", program, cwd=tmp_path, path=str(tmp_path / "site"))
    assert found == "quickstart\n"


def without(hidden: str, path: str, words: list[str]) -> int:
    """Call `ctpo` of the packages in a folder, without a module; in a process that has imported everything else."""
    for name in [name for name in sys.modules if name.startswith("ctpo_") or f"{name}.".startswith(f"{hidden}.")]:
        del sys.modules[name]
    sys.modules[hidden] = None  # type: ignore[assignment]  # as Python marks what cannot be imported
    sys.path.insert(0, path)
    from ctpo_megatron import cli

    assert Path(cli.__file__).is_relative_to(path)
    return cli.main(words)


def test_advice_is_for_the_kind_of_install(built: Path, tmp_path: Path) -> None:
    """A wheel has no checkout to install from; a checkout may be another folder than the current one."""
    for wheel in built.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    task = task_folder(*SMALL_TASK)
    sizes = ("data.max_prompt_tokens=64", "rollout.max_response_tokens=64", "rollout.engine.max_model_len=128")
    evaluation = ["eval", str(task / "model"), "--data", str(task / "heldout.parquet"), *sizes]
    verbs = {"torch": ["verify"], "ctpo_kernels": ["verify"], "ctpo_answers": evaluation}
    advice = {
        (tmp_path / "site", tmp_path): ("'ctpo-megatron[train]'", "ctpo_kernels-*.whl", "ctpo_answers-*.whl"),
        (ROOT, tmp_path): (f"-e '{ROOT}[train]'", f"{ROOT}/kernels", f"{ROOT}/answers"),
        (ROOT, ROOT): ("-e '.[train]'", "./kernels", "./answers"),
    }
    for (path, folder), (train, kernels, answers) in advice.items():
        wanted = {"torch": train, "ctpo_kernels": f"--no-deps {kernels}", "ctpo_answers": f"--no-deps {answers}"}
        for hidden, words in verbs.items():
            done = prefork().run(without, hidden, str(path), words, directory=folder, deadline_s=60)
            said = f"{hidden} is not installed, and this needs it: pip install {wanted[hidden]} (`ctpo doctor`"
            assert done.returncode == 2 and said in done.stderr, done.stdout + done.stderr


def test_whatever_the_base_install_lacks_has_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    declared: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: declared.update(arguments))
    monkeypatch.chdir(ROOT)
    runpy.run_path("setup.py")
    base = with_their_own(declared["install_requires"])
    brought_by = importlib.metadata.packages_distributions()
    files = [path for folder in ("ctpo_megatron", "sandbox") for path in modules_of(ROOT / folder)]
    imported = {name.split(".")[0] for path in files for _, name in imports_of(path, package_of(path))}
    foreign = {name for name in imported - sys.stdlib_module_names if not ours(name)}
    lacks = {name for name in foreign if not base.intersection(map(canonicalize_name, brought_by.get(name, [])))}
    assert lacks > {"torch", "vllm", "fastapi"}
    assert lacks <= {module for modules in _EXTRAS.values() for module in modules}
    assert _EXTRAS.keys() - {"engine"} <= declared["extras_require"].keys() >= {"cpu", "cuda"}


def with_their_own(texts: Iterable[str]) -> set[str]:
    """The distributions that requirements bring, and all that these require without an extra."""
    found, waiting = set[str](), [*texts]
    while waiting:
        wanted = Requirement(waiting.pop())
        name = canonicalize_name(wanted.name)
        if name not in found and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
            found.add(name)
            waiting += importlib.metadata.requires(name) or []
    return found


def installed(wheel: Path, folder: Path) -> Path:
    """`bin` of a new environment with a wheel and what it requires."""
    run(sys.executable, "-m", "venv", folder, cwd=wheel.parent)
    python = folder / "bin" / "python"
    try:
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel, cwd=wheel.parent)
    except AssertionError as error:
        if re.search("No matching distribution|Could not find a version|Max retries", str(error)):
            pytest.skip("no package registry answers")
        raise
    return folder / "bin"


@pytest.mark.slow
@pytest.mark.network
def test_answers_are_judged_without_anything_else_of_ours(built: Path, tmp_path: Path) -> None:
    """In an empty environment."""
    python = installed(next(built.glob("ctpo_answers-*.whl")), tmp_path / "venv") / "python"
    judge = (python, "-m", "ctpo_answers")
    assert run(*judge, r"\frac12", "0.5", cwd=tmp_path).startswith("score         1\n")
    assert run(*judge, "x^2+1", "1+x+x^2", cwd=tmp_path, status=1).startswith("score         0\n")
    packages = run(python, "-m", "pip", "list", cwd=tmp_path)
    assert re.findall(r"^(ctpo\S*|torch|numpy)\b", packages, re.M) == ["ctpo-answers"]


@pytest.fixture(scope="module")
def login_node(built: Path) -> Path:
    """The base install: one wheel, without answers, kernels, torch, vLLM, Ray and what else trains."""
    return installed(next(built.glob("ctpo_megatron-*.whl")), built / "venv")


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.timeout(900)
def test_the_base_install_serves_a_login_node(login_node: Path, tmp_path: Path) -> None:
    ctpo = login_node / "ctpo"
    packages = run(login_node / "python", "-m", "pip", "list", cwd=tmp_path)
    assert [
        name
        for name in ("ctpo-answers", "ctpo-kernels", "torch", "vllm", "ray", "transformers")
        if re.search(rf"^{name}\b", packages, re.M)
    ] == []
    assert "write a checkpoint in Hugging Face format" in run(ctpo, "--help", cwd=tmp_path)
    checks = run(ctpo, "doctor", cwd=tmp_path, status=1)  # what it lacks for training
    assert re.search(
        r"To install what is missing: pip install 'ctpo-megatron\[(cpu|cuda),sandbox,train\]'$", checks, re.M
    )
    refused = run(ctpo, "verify", cwd=tmp_path, status=2)
    assert "torch is not installed, and this needs it: pip install 'ctpo-megatron[train]'" in refused
    missing = run(ctpo, "train", "quickstart", "--dry-run", cwd=tmp_path, status=2)
    assert "python -m examples.toolmath data/toolmath" in missing
    task = task_folder(*SMALL_TASK)
    plan = run(ctpo, "train", "quickstart", "--dry-run", *task_files(task), sft_file(task), cwd=tmp_path)
    assert "32 prompts x 8 samples" in plan
    assert "not checked (without transformers, tokenizers: pip install 'ctpo-megatron[train]')" in plan
    shape = next(login_node.parent.glob("lib/*/site-packages/ctpo_megatron/configs/models/qwen3_4b.json"))
    plan = run(ctpo, "train", "qwen3_4b_tir", "--dry-run", "-v", "--cuda", "--shapes", shape, cwd=tmp_path)
    assert "Memory of each GPU on CUDA" in plan
    finished, stored = write_run(tmp_path / "runs" / "finished"), unpacked(ARCHIVES[-1], tmp_path)
    PositionsWriter(stored).log(2, {"last": drawn()[0].record()})  # enough tokens for a fit
    run(ctpo, "report", stored, cwd=tmp_path)
    assert "std(S_t) grows like sqrt(t)" in (stored / "report.html").read_text(encoding="utf-8")
    run(ctpo, "compare", finished, stored, "--out", "both.html", cwd=tmp_path)
    assert "<html" in (tmp_path / "both.html").read_text(encoding="utf-8")
    refused = run(ctpo, "launch", "quickstart", "--executor", "local", "--dry-run", cwd=tmp_path, status=2)
    assert "ctpo launch works from a checkout" in refused
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "both.html"}
