"""Debian's packages for the tests of this folder. Also a command: `python -m tests.cluster.packages [--install]`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "shellcheck")
COMMAND = "apt-get install --yes --no-install-recommends slurmctld slurmd slurm-client munge shellcheck"
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def missing() -> list[str]:
    """Programs that the packages would bring."""
    return [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]


def main() -> int:
    if not (names := missing()):
        return 0
    if "--install" not in sys.argv:
        print(f"missing: {', '.join(names)}; as root:\n  {COMMAND}\nor: make test-cluster INSTALL=1", file=sys.stderr)
        return 1
    subprocess.run(["apt-get", "update", "--quiet"], check=True, timeout=600)
    return subprocess.run(COMMAND.split(), timeout=1200).returncode


if __name__ == "__main__":
    sys.exit(main())
