"""The bundle for a GPU machine without the internet: a made-up wheel is packed, carried and unpacked."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.gpu_bundle import __main__ as program
from benchmarks.gpu_bundle import fatbin
from benchmarks.gpu_bundle.contents import Contents
from benchmarks.gpu_bundle.wheels import Lock
from tests.support.prefork import ROOT

pytestmark = pytest.mark.slow  # benchmarks are run by hand: weekly is often enough
PTX, CUBIN = 1, 2
PYTHON = "{}.{}".format(*sys.version_info)
CODE = 400_000


def entry(kind: int, architecture: int) -> bytes:
    """Code of one architecture that does not compress."""
    code = hashlib.shake_128(b"%d %d" % (kind, architecture)).digest(CODE)
    return struct.pack("<HHIQ12xI32x", kind, 0x101, 64, CODE, architecture) + code


def fat(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(*fatbins: bytes, section: bytes = b".nv_fatbin") -> bytes:
    """An ELF file of 64 bits with a section of fatbins; what follows it must not move."""
    code = bytes(8).join(fatbins)
    names = b"\0" + section + b"\0.shstrtab\0"
    table = 64 + len(code) + len(names)
    header = b"\x7fELF\2\1\1".ljust(40, b"\0") + struct.pack("<Q10xHHH", table, 64, 3, 2)
    sections = [(0, 0, 0), (1, 64, len(code)), (len(section) + 2, 64 + len(code), len(names))]
    rows = [struct.pack("<II8x8xQQ", name, 1, offset, size).ljust(64, b"\0") for name, offset, size in sections]
    return header.ljust(64, b"\0") + code + names + b"".join(rows)


def wheel(folder: Path, name: str, tag: str, files: dict[str, bytes]) -> str:
    """A wheel of version 1.0 in the folder; returns its line of a lock."""
    path = folder / f"{name}-1.0-{tag}.whl"
    metadata = {
        f"{name}-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{name}-1.0.dist-info/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n",
        f"{name}-1.0.dist-info/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in {**metadata, **files}.items():
            info = zipfile.ZipInfo(member)
            info.external_attr = (0o755 if member.endswith("run") else 0o644) << 16
            archive.writestr(info, data)
    return f"{name.replace('_', '-')}==1.0 \\\n    --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


def source(folder: Path) -> str:
    """A package without a wheel; returns its line of a lock."""
    (tree := folder / "tree" / "sourced-1.0").mkdir(parents=True)
    (tree / "setup.py").write_text(
        "from setuptools import setup\nsetup(name='sourced', version='1.0', py_modules=['sourced'])\n"
    )
    (tree / "sourced.py").write_text("FROM = 'source'\n")
    path = folder / "sourced-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(tree, tree.name)
    return f"sourced==1.0 \\\n    --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an index of made-up packages, their lock, the contents of a bundle, and a model."""
    (index := tmp_path / "index").mkdir()
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(name, value)
    native = f"cp{PYTHON.replace('.', '')}-cp{PYTHON.replace('.', '')}-manylinux_2_28_x86_64"
    kernels = library(fat(entry(CUBIN, 80), entry(CUBIN, 90), entry(PTX, 80)), fat(entry(CUBIN, 100)))
    files = {"made_up/__init__.py": b"", "made_up/_C.so": kernels, "made_up/run": b"", "made_up/server": b"x" * 10}
    lines = [
        wheel(index, "made_up", native, files | {"made_up/fa3.so": library(fat(entry(CUBIN, 80), entry(CUBIN, 90)))})
    ]
    lines += [wheel(index, "pure", "py3-none-any", {"pure.py": b"VALUE = 1\n"}), source(index)]
    (tmp_path / "lock.txt").write_text("# a lock\n" + "".join(lines))
    contents = {
        "python": PYTHON,
        "architectures": ["sm_90"],
        "lock": str(tmp_path / "lock.txt"),
        "archives": {
            "first": {"packages": ["made-up", "sourced"]},
            "second": {"packages": ["pure"], "members": ["made_up/fa3.so"]},
        },
        "models": "second",
        "from_source": ["sourced"],
        "prune": ["made_up/*.so"],
        "left_out": {"made_up/server": "not used"},
        "machine": ["pip", "a-package-that-nobody-has"],
        "not_needed": {},
    }
    (tmp_path / "contents.yaml").write_text(yaml.safe_dump(contents))
    (model := tmp_path / "sft").mkdir()
    (model / "config.json").write_text("{}")
    return tmp_path


def build(machine: Path, *more: str) -> int:
    places = ["--cache", str(machine / "cache"), "--contents", str(machine / "contents.yaml")]
    return program.main([str(machine / "out"), "--arch", "sm_90", *places, *more])


def unpack(machine: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(machine / "out" / "unpack.sh"), str(machine / "site")]
    given = {**os.environ, "PYTHON": sys.executable, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=given)


def manifest(machine: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((machine / "out" / "manifest.json").read_text())
    return read


def test_what_was_packed_is_imported_where_it_is_unpacked(machine: Path) -> None:
    assert build(machine, "--model", str(machine / "sft"), "--limit-mib", "1.5") == 0
    told = manifest(machine)
    assert (told["architecture"], told["python"], told["models"]) == ("sm_90", PYTHON, ["sft"])
    assert told["packages"] == {"made-up": "1.0", "pure": "1.0", "sourced": "1.0"}
    assert told["left_out"] == {"made_up/server": {"why": "not used", "files": 1, "bytes": 10}}
    assert told["pruned"]["made_up/_C.so"] == {"before": 4 * (CODE + 64), "after": 2 * (CODE + 64)}
    for archive in told["archives"]:
        data = (machine / "out" / archive["name"]).read_bytes()
        assert (archive["bytes"], archive["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    with tarfile.open(machine / "out" / "second.tar.xz") as second:
        assert "made_up/fa3.so" in second.getnames()
    done = unpack(machine)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "unpacked first.tar.xz\nunpacked second.tar.xz\n"
    assert done.stderr == "warning: this Python lacks what the bundle expects: a-package-that-nobody-has\n"
    site = machine / "site"
    code = "import importlib.metadata as m, made_up, pure, sourced; print(sourced.FROM, m.version('made_up'))"
    seen = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(site)}, capture_output=True, text=True, check=True
    )
    assert seen.stdout == "source 1.0\n"
    assert os.access(site / "made_up" / "run", os.X_OK) and not (site / "made_up" / "server").exists()
    assert (site / "made_up" / "fa3.so").is_file() and (site / "models" / "sft" / "config.json").is_file()


def test_nothing_is_unpacked_of_a_damaged_bundle(machine: Path) -> None:
    assert build(machine) == 0
    first, second = (machine / "out" / f"{name}.tar.xz" for name in ("first", "second"))
    whole = second.read_bytes()
    second.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    (machine / "out" / "other.tar.xz").touch()
    done = unpack(machine)
    assert done.returncode == 1 and not (machine / "site").exists()
    assert "other.tar.xz is not in manifest.json\nsecond.tar.xz is damaged, bring it again: sha256 " in done.stderr
    (machine / "out" / "other.tar.xz").unlink()
    second.unlink()
    done = unpack(machine)  # archives may come one after another
    assert (done.returncode, done.stdout) == (0, "unpacked first.tar.xz\nnot here: second.tar.xz\n")
    first.unlink()
    assert "no archive lies in" in unpack(machine).stderr


@pytest.mark.parametrize(
    ("architecture", "given", "kept"),
    [
        (90, [(CUBIN, 80), (CUBIN, 90), (PTX, 90)], [(CUBIN, 90)]),
        (89, [(CUBIN, 75), (CUBIN, 80), (CUBIN, 90), (PTX, 80), (PTX, 90)], [(CUBIN, 80), (PTX, 80)]),
        (90, [(CUBIN, 80), (PTX, 80)], [(PTX, 80)]),
        (90, [(CUBIN, 100), (PTX, 100)], [(CUBIN, 100), (PTX, 100)]),
    ],
)
@pytest.mark.parametrize("section", fatbin.SECTIONS)
def test_code_that_cannot_run_becomes_zeros_and_nothing_moves(
    architecture: int, given: list[tuple[int, int]], kept: list[tuple[int, int]], section: str
) -> None:
    entries, stay = ([entry(*one) for one in some] for some in (given, kept))
    other = fat(entry(CUBIN, architecture))
    data = bytearray(library(fat(*entries), other, section=section.encode()))
    sizes = fatbin.prune(data, architecture)
    assert sizes == tuple((CODE + 64) * (count + 1) for count in (len(given), len(kept)))
    expected = fat(*stay).ljust(len(fat(*entries)), b"\0")
    assert data == library(expected, other, section=section.encode())


def test_every_package_of_the_lock_is_carried_expected_or_left_out_with_a_reason() -> None:
    contents = Contents.read(program.HERE / "contents.yaml")
    named = [*contents.packages, *contents.machine, *(name for names in contents.not_needed.values() for name in names)]
    assert sorted(named) == sorted(Lock(ROOT / contents.lock).versions)
