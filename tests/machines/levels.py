"""A command: what the self-test says of each level on this machine, as JSON."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from ctpo_sandbox import SandboxStartError, start_server
from ctpo_sandbox.records import LEVELS
from tests.support.deadlines import scaled


def said_of(level: str) -> str:
    """Nothing where the level holds, else why not."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        try:
            start_server(
                slots=1, tiers=["stdlib"], require="none", level=level, start_timeout_s=scaled(60), log_path=log
            ).stop()
            return ""
        except SandboxStartError as error:
            _, found, reason = str(error).partition(f"({level}: ")
            return reason.partition("). ")[0] if found else str(error)


if __name__ == "__main__":
    print(json.dumps({level: said_of(level) for level in LEVELS}))
