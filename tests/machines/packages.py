"""Debian's kernels, in a folder of their own: none of them is installed.

Also a command, `python -m tests.machines.packages [--install]`: looks for the emulator, and fetches what a guest needs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path, PurePath
from typing import NamedTuple

CACHE = Path(__file__).resolve().parents[2] / "build" / "machines"
EMULATOR = "qemu-system-x86_64"
INSTALL = "apt-get install --yes --no-install-recommends qemu-system-x86"
SUITES = ("bookworm", "trixie")
"""Linux 6.1 and 6.12."""

_MIRROR = "DEBIAN_MIRROR"
_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
_BUSYBOX = "bin/busybox$"
_KERNEL = r"/vmlinuz-|/(virtio(_ring|_pci.*)?|fscache|netfs|9p|9pnet(_virtio)?|overlay)\.ko"
_LIMIT_S = 1200


class Kernel(NamedTuple):
    """A folder of its own, with the image and the modules that a guest loads."""

    folder: Path

    @property
    def image(self) -> Path:
        return next(self.folder.glob("vmlinuz-*"))

    @property
    def modules(self) -> list[Path]:
        return sorted(self.folder.glob("*.ko*"))


def kernel(suite: str) -> Kernel:
    """The kernel of a suite, once `fetch` was there."""
    return Kernel(CACHE / suite)


def busybox() -> Path:
    return CACHE / "busybox"


def fetch() -> None:
    """The packages, whose sums apt checks, and of them what a guest needs. What is there already stays."""
    if busybox().exists() and all(kernel(suite).folder.is_dir() for suite in SUITES):
        return
    for folder in ("lists/partial", "archives/partial"):
        (CACHE / folder).mkdir(parents=True, exist_ok=True)
    sources = [f"deb [signed-by={_KEYS}] {_mirror()} {suite} main\n" for suite in SUITES]
    (CACHE / "sources.list").write_text("".join(sources))
    _apt("get", "--quiet", "update")
    _unpack(_download(f"busybox-static/{SUITES[-1]}"), CACHE, _BUSYBOX)
    for suite in SUITES:
        depends = re.search(r"^Depends: (\S+) \(= (\S+)\)", _apt("cache", "show", f"linux-image-amd64/{suite}"), re.M)
        assert depends, f"{suite}: no kernel"
        part = CACHE / f"{suite}.part"
        shutil.rmtree(part, ignore_errors=True)
        _unpack(_download(f"{depends[1]}={depends[2]}"), part, _KERNEL)
        part.rename(kernel(suite).folder)


def _mirror() -> str:
    """The one that this machine uses."""
    if named := os.environ.get(_MIRROR):
        return named
    known = _run("apt-get", "indextargets", "--format", "$(ORIGIN) $(REPO_URI)")
    for origin, address in (line.split() for line in known.splitlines()):
        if origin == "Debian" and not address.rstrip("/").endswith("-security"):
            return address
    raise SystemExit(f"this machine's apt knows no mirror of Debian; name one: {_MIRROR}=<URI> make test-kernels")


def _apt(program: str, *arguments: str) -> str:
    places = {
        "Dir::Etc::sourcelist": CACHE / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": CACHE / "lists",
        "Dir::Cache": CACHE,
        "APT::Sandbox::User": "root",
    }
    return _run(f"apt-{program}", *(f"-o{name}={value}" for name, value in places.items()), *arguments)


def _download(package: str) -> Path:
    _apt("get", "--quiet", "download", package)
    (found,) = CACHE.glob(f"{re.split('[=/]', package)[0]}_*.deb")
    return found


def _unpack(package: Path, folder: Path, wanted: str) -> None:
    """The files whose paths match, without their folders."""
    folder.mkdir(exist_ok=True)
    with (
        subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as unpacking,
        tarfile.open(fileobj=unpacking.stdout, mode="r|") as archive,
    ):
        for member in archive:
            if re.search(wanted, member.name) and (content := archive.extractfile(member)):
                (folder / PurePath(member.name).name).write_bytes(content.read())
    assert unpacking.returncode == 0, package
    package.unlink()


def _run(*command: str) -> str:
    return subprocess.run(command, cwd=CACHE, check=True, text=True, stdout=subprocess.PIPE, timeout=_LIMIT_S).stdout


def main() -> int:
    CACHE.mkdir(parents=True, exist_ok=True)
    if shutil.which(EMULATOR) is None:
        if "--install" not in sys.argv:
            print(f"missing: {EMULATOR}; as root:\n  {INSTALL}\nor: make test-kernels INSTALL=1", file=sys.stderr)
            return 1
        _run("apt-get", "--quiet", "update")
        _run(*INSTALL.split())
    fetch()
    return 0


if __name__ == "__main__":
    sys.exit(main())
