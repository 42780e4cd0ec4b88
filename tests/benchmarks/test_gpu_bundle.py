"""The bundle for a GPU machine without the internet: how it is unpacked, and which code of a library stays.

The real one is made and used in tests/cuda_environment/test_bundle.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks.gpu_bundle import __main__ as program
from benchmarks.gpu_bundle import fatbin
from benchmarks.gpu_bundle.contents import Contents
from benchmarks.gpu_bundle.wheels import Lock
from tests.support.prefork import ROOT

pytestmark = pytest.mark.slow  # benchmarks are run by hand: weekly is often enough
PTX, CUBIN = 1, 2
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


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A folder with two small archives, their manifest, and the script that unpacks them."""
    archives = []
    for name in ("first", "second"):
        (module := tmp_path / f"{name}_module.py").write_text(f"NAME = {name!r}\n")
        path = tmp_path / f"{name}.tar.xz"
        with tarfile.open(path, "w:xz") as archive:
            archive.add(module, module.name)
        archives.append({"name": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()})
    contents = {"python": "{}.{}".format(*sys.version_info), "archives": archives, "machine": ["a-package-nobody-has"]}
    (tmp_path / "manifest.json").write_text(json.dumps(contents))
    shutil.copy(program.HERE / "unpack.sh", tmp_path)
    return tmp_path


def unpack(bundle: Path) -> subprocess.CompletedProcess[str]:
    command = ["sh", str(bundle / "unpack.sh"), str(bundle / "site")]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHON": sys.executable}
    )


def test_a_bundle_is_unpacked_as_its_archives_come(bundle: Path) -> None:
    second = bundle / "second.tar.xz"
    whole = second.read_bytes()
    second.unlink()
    done = unpack(bundle)
    assert (done.returncode, done.stdout) == (0, "unpacked first.tar.xz\nnot here: second.tar.xz\n")
    second.write_bytes(whole)
    done = unpack(bundle)
    assert done.stdout == "unpacked first.tar.xz\nunpacked second.tar.xz\n"
    assert done.stderr == "warning: this Python lacks what the bundle expects: a-package-nobody-has\n"
    assert {path.name for path in (bundle / "site").iterdir()} == {"first_module.py", "second_module.py"}


def test_nothing_is_unpacked_of_a_damaged_bundle(bundle: Path) -> None:
    first, second = (bundle / f"{name}.tar.xz" for name in ("first", "second"))
    whole = second.read_bytes()
    second.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    (bundle / "other.tar.xz").touch()
    done = unpack(bundle)
    assert done.returncode == 1 and not (bundle / "site").exists()
    assert "other.tar.xz is not in manifest.json\nsecond.tar.xz is damaged, bring it again: sha256 " in done.stderr
    for path in (first, second, bundle / "other.tar.xz"):
        path.unlink()
    assert "no archive lies in" in unpack(bundle).stderr


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
