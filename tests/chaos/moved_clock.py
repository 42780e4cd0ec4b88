"""`ctpo train` whose time of day is off by the seconds in a file: python -m tests.chaos.moved_clock FILE CONFIG ..."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from ctpo_megatron import cli


def main(offset: Path, arguments: list[str]) -> int:
    now = time.time
    time.time = lambda: now() + float(offset.read_text() or 0)
    return cli.main(["train", *arguments])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
