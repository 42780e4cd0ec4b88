"""The wheels of a lock, downloaded by pip against the lock's hashes."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

GLIBC = 39
"""Minor version of the newest glibc 2 that wheels may be built for: that of Ubuntu 24.04."""
PLATFORMS = [
    *(f"manylinux_2_{minor}_x86_64" for minor in range(GLIBC, 4, -1)),
    *(f"manylinux{name}_x86_64" for name in ("2014", "2010", "1")),
]


class Lock:
    """Requirements with hashes. Raises ValueError for packages that the lock does not have."""

    def __init__(self, path: Path) -> None:
        """Read what `make locks` writes: `name==version`, then its hashes on lines that continue."""
        self.path = path
        blocks = re.findall(r"^([\w.-]+)==(\S+)((?:.*\\\n)*.*)", path.read_text(encoding="utf-8"), re.MULTILINE)
        self._blocks = {name: f"{name}=={version}{hashes}" for name, version, hashes in blocks}
        self.versions: dict[str, str] = {name: version for name, version, _ in blocks}

    def wheels(self, names: Sequence[str], built: Sequence[str], python: str, cache: Path) -> dict[str, Path]:
        """Wheels of packages for CPython and Linux on x86-64, by name, in `cache`.

        python: "3.12". built: names of those that have no wheel on the index; pip builds them, so they should be pure
        Python. Raises ValueError for one that is not, and where pip fails, which says why.
        """
        if unknown := sorted(set(names) - set(self._blocks)):
            raise ValueError(f"{self.path} has no {', '.join(unknown)}")
        cache.mkdir(parents=True, exist_ok=True)
        abis = [f"--abi={abi}" for abi in (f"cp{python.replace('.', '')}", "abi3", "none")]
        target = ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *abis]
        target += [f"--platform={platform}" for platform in PLATFORMS]
        downloaded = [name for name in names if name not in built]
        self._pip(["download", "-d", str(cache), *target], downloaded)
        self._pip(["wheel", "-w", str(cache), "--no-build-isolation"], [name for name in names if name in built])
        cached = {parse_wheel_filename(path.name)[:2]: path for path in cache.glob("*.whl")}
        chosen = {name: cached[canonicalize_name(name), Version(self.versions[name])] for name in names}
        if impure := [name for name in built if not chosen[name].stem.endswith("-none-any")]:
            raise ValueError(f"{', '.join(impure)}: built for this machine alone, as not pure Python")
        return chosen

    def _pip(self, command: list[str], names: Sequence[str]) -> None:
        if not names:
            return
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("\n".join(self._blocks[name] for name in names) + "\n")
            file.flush()
            pip = [sys.executable, "-m", "pip", command[0], "--quiet", "--disable-pip-version-check", *command[1:]]
            done = subprocess.run([*pip, "--no-deps", "--require-hashes", "-r", file.name], check=False)
        if done.returncode:
            raise ValueError(f"pip {command[0]} ended with status {done.returncode}")
