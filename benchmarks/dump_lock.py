"""How long the thread of a dump keeps the interpreter's lock from another: `python -m benchmarks.dump_lock`.

The other thread looks at the clocks in a loop, as one that trains launches kernels. Where a gap between two looks is
long, the thread of the dump held the lock, for the processor time that it used in the gap at most. Gaps in which the
system took the processor from the other thread are left out: they say nothing of the lock.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.dump import FORMS, byte_tokenizer, made_up
from ctpo_megatron.tracking import Decode, write_trajectories


def holds(work: Callable[[], Any]) -> tuple[list[float], float]:
    """Milliseconds for which the thread of `work` held the lock, longest first; and its CPU seconds."""
    thread = threading.Thread(target=work)
    thread.start()
    assert thread.ident is not None
    clock = time.pthread_getcpuclockid(thread.ident)
    found = []
    began = spent = time.clock_gettime(clock)
    looked, taken = time.perf_counter(), 0
    while thread.is_alive():
        try:
            cpu = time.clock_gettime(clock)
        except OSError:  # it has just ended
            break
        now, switches = time.perf_counter(), resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
        if switches == taken:
            found.append(min(now - looked, cpu - spent) * 1e3)
        looked, spent, taken = now, cpu, switches
    return sorted(found, reverse=True), spent - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of a dump")
    parser.add_argument("--length", type=int, nargs="*", default=[3_400, 32_000], help="tokens of a trajectory")
    options = parser.parse_args()
    tokenizer = byte_tokenizer()
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    with tempfile.TemporaryDirectory() as folder:  # imports, and the text of single tokens, once
        write(Path(folder), list(made_up(tokenizer.get_vocab_size(), 4, 8, 3_400)[0]), decode, "parquet")
    for length in options.length:
        groups = list(made_up(tokenizer.get_vocab_size(), max(1, options.tokens // length // 8), 8, length)[0])
        tokens = sum(len(trajectory) for group in groups for trajectory in group.trajectories)
        for form in FORMS:
            with tempfile.TemporaryDirectory() as folder:
                found, cpu = holds(lambda: write(Path(folder), groups, decode, form))  # noqa: B023 - used at once
            worst = ", ".join(f"{hold:.1f}" for hold in found[:5])
            over = sum(hold > 5 for hold in found)
            print(
                f"{form}, {length} tokens a trajectory: longest {worst} ms; {over} over 5 ms; "
                f"{cpu * 1e6 / tokens:.2f} CPU-s per million tokens"
            )


def write(folder: Path, groups: list[Any], decode: Decode, form: Any) -> None:
    write_trajectories(folder, 1, groups, decode, form=form)


if __name__ == "__main__":
    main()
