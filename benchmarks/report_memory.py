"""Memory and CPU time of `ctpo report` on two dumps of a batch of the paper: `python -m benchmarks.report_memory`."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.dump import FORMS, byte_tokenizer, made_up
from ctpo_megatron.tracking import write_trajectories

PROMPTS, SAMPLES, TOKENS, TRACED = 512, 8, 3_400, 256
"""Trajectories of a dump, their tokens, and how many of the last have traces: one mini-batch of the paper."""
_CHILD = """
import re, sys, time
from pathlib import Path
from ctpo_megatron.report import write_report
write_report(Path(sys.argv[1]))
peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
print(peak // 1024, round(time.process_time(), 1))
"""
# Not ru_maxrss, in which a process begins with the size of the one that started it.


def run_directory(folder: Path, form: Any, prompts: int) -> None:
    """A run directory with the dumps of its first and last step."""
    (folder / "config.yaml").write_text("run: {name: large}\n")
    tokenizer = byte_tokenizer()
    for step in (1, 2):
        groups, extra = made_up(tokenizer.get_vocab_size(), prompts, SAMPLES, TOKENS, traced=TRACED)
        write_trajectories(
            folder, step, groups, lambda ids: tokenizer.decode(ids, skip_special_tokens=False), extra=extra, form=form
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--form", choices=FORMS, default="parquet")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help=f"of a dump, {SAMPLES} trajectories each")
    parser.add_argument("--run", type=Path, help="a run directory instead of a made-up one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.run is None:
            run_directory(Path(folder), options.form, options.prompts)
        command = [sys.executable, "-c", _CHILD, str(options.run or folder)]
        peak, seconds = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    print(f"{options.form}, {options.prompts * SAMPLES:,} trajectories a dump: peak {peak} MiB, {seconds} CPU-s")


if __name__ == "__main__":
    main()
