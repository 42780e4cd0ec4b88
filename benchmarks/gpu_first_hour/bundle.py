"""Unpacks what `python -m benchmarks.gpu_bundle` has packed, once."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path


class BundleError(RuntimeError):
    """A folder is no bundle, or does not unpack here."""


def unpack(bundle: Path, site: Path) -> None:
    """Unpack a bundle into `site`, unless the same archives of it are there. Raises BundleError."""
    script, manifest = bundle / "unpack.sh", bundle / "manifest.json"
    if absent := [file.name for file in (script, manifest) if not file.is_file()]:
        raise BundleError(f"{bundle} has no {' and no '.join(absent)}: make it with python -m benchmarks.gpu_bundle")
    archives = sorted(file.name for file in bundle.glob("*.tar.*"))  # they may come one after another
    content = f"{hashlib.sha256(manifest.read_bytes()).hexdigest()} {' '.join(archives)}"
    done = site / ".unpacked"
    if done.exists() and done.read_text() == content:
        return
    site.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"PYTHON": sys.executable}
    if status := subprocess.run(["sh", str(script), str(site)], env=environment, check=False).returncode:
        raise BundleError(f"{script} ended with exit status {status}")
    done.write_text(content)


def model(site: Path | None) -> Path | None:
    """The model that a bundle carries, if any."""
    return next(iter(sorted((site / "models").glob("*"))), None) if site is not None else None
