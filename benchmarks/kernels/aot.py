"""Compile every Triton kernel without a GPU and hold its registers, spills, memory and instructions against limits.

`PYTHONPATH=.:kernels python -m benchmarks.kernels.aot [--arch 80 90 100] [--quick] [--json FILE]` prints a table. The
exit status is 1 if a kernel spills, exceeds a limit or does not compile, and 2 if nothing can be compiled here. The
launchers themselves provide the configurations (`aot_launches`). `--tile 256:8` compiles the loss with other tiles.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import io
import json
import multiprocessing
import os
import re
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.kernels import sass
from benchmarks.kernels.aot_launches import KernelLaunch, configurations, recorded
from ctpo_kernels import dispatch

ARCHITECTURES = (80, 90, 100)

# Registers a thread. A multiprocessor has 65536: under these limits at least 16 programs of the loss fit side by side,
# each of one warp, two of 16 warps for the rows, and eight of 4 warps for a layer, so that one computes while another
# waits for memory.
REGISTERS = {
    "span_totals_kernel": 96,
    "count_kernel": 64,
    "loss_kernel": 128,
    "reduce_kernel": 128,
    "row_stats_kernel": 64,
    "gradient_kernel": 64,
    "merge_kernel": 128,
    "swiglu_kernel": 64,
    "swiglu_grad_kernel": 64,
    "rotary_kernel": 64,
}
INSTRUCTIONS = {"span_totals_kernel": 46, "loss_kernel": 194}
"""A token, in the loop over tiles: 240 for the two passes over a batch, whatever its options are."""

PER_TOKEN_INSTRUCTIONS = 70
"""More, where the loss is asked for what happened at every token: four results to store."""
SHARED_BYTES = 16 << 10
"""Shared memory of any kernel: only reductions and scans use it."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What the assembler says of one launch on one architecture; `error` is empty where it compiled.

    instructions, other_instructions: of the loss, a token and what a program does once. unordered: a gradient that lies
    over its logits is written before they are read.
    """

    kernel: str
    configuration: str
    arch: int
    warps: int
    registers: int = 0
    spill_bytes: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    instructions: float = 0.0
    most_instructions: int = 0
    other_instructions: int = 0
    unordered: bool = False
    error: str = ""

    def failures(self, limits: dict[str, int]) -> list[str]:
        """Everything that is wrong with it, one line each."""
        where = f"{self.kernel} ({self.configuration}) on sm_{self.arch}"
        if self.error:
            return [f"{where} does not compile: {self.error}"]
        limit, most = limits[self.kernel], self.most_instructions
        checks = (
            (self.registers > limit, f"{self.registers} registers, limit {limit}"),
            (self.spill_bytes > 0, f"spills {self.spill_bytes} bytes"),
            (self.stack_bytes > 0, f"has a stack frame of {self.stack_bytes} bytes"),
            (self.shared_bytes > SHARED_BYTES, f"{self.shared_bytes} bytes of shared memory, limit {SHARED_BYTES}"),
            (self.instructions > most, f"{self.instructions:.0f} instructions a token, limit {most}"),
            (self.unordered, "stores to memory that other threads have still to load"),
        )
        return [f"{where}: {text}" for failed, text in checks if failed]


def launches(*, quick: bool = False) -> list[KernelLaunch]:
    """All different launches; `quick`: of the default configurations, and one of each kernel that these do not launch.

    Raises LookupError if a kernel of the package is in none of them, or has no limit.
    """
    found: dict[str, KernelLaunch] = {}
    chosen = configurations().items()
    for name, run in sorted(chosen, key=lambda item: not item[0].startswith("default")) if quick else chosen:
        known = {launch.kernel for launch in found.values()}
        if quick and not name.startswith("default") and known == _kernels():
            break
        for launch in recorded(run, name):
            if not quick or name.startswith("default") or launch.kernel not in known:
                found.setdefault(launch.key, launch)
    missing = _kernels() - {launch.kernel for launch in found.values()}
    if missing or _kernels() != REGISTERS.keys():
        raise LookupError(
            f"kernels in no configuration: {sorted(missing)}; with a limit but gone, or without one: "
            f"{sorted(_kernels() ^ REGISTERS.keys())}"
        )
    return list(found.values())


def with_tile(launch: KernelLaunch, tile: str) -> KernelLaunch:
    """A launch of the loss with tiles of other sizes, `BLOCK:RUN[:REGISTERS]`; another launch as it is.

    BLOCK: tokens of a tile. RUN: adjacent ones of a thread. REGISTERS: most that a thread may have.
    """
    if launch.kernel not in INSTRUCTIONS:
        return launch
    block, run, *registers = map(int, tile.split(":"))
    options = launch.options | ({"maxnreg": registers[0]} if registers else {})
    return dataclasses.replace(launch, constants=launch.constants | {"BLOCK": block, "RUN": run}, options=options)


def _kernels() -> set[str]:
    from triton.runtime.jit import JITFunction

    from ctpo_kernels import layer_kernels, loss_kernels, rows_kernels

    return {
        name
        for module in (layer_kernels, loss_kernels, rows_kernels)
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and name.endswith("_kernel")
    }


def compile_launch(launch: KernelLaunch, arch: int) -> Report:
    """Compile one launch for sm_`arch` and read what ptxas reports.

    A compiler error becomes the report's `error`, so that one kernel's failure does not hide the others'.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(launch.module), launch.kernel)
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in launch.divisible}
    source = ASTSource(kernel, launch.signature, launch.constants, attributes)
    # ptxas reports spills only while it works, and a cached kernel comes without the report.
    triton.knobs.compilation.always_compile = True
    triton.knobs.nvidia.dump_ptxas_log = True
    log = io.StringIO()
    report = partial(Report, launch.kernel, launch.configuration, arch, launch.warps)
    try:
        with contextlib.redirect_stdout(log):
            compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.options)
    except Exception as error:
        return report(error=f"{type(error).__name__}: {error}")
    used = re.search(r"Used (\d+) registers", log.getvalue())
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log.getvalue())
    if used is None or frame is None:
        return report(error=f"ptxas reported no resources:\n{log.getvalue()}")
    stack, stores, loads = map(int, frame.groups())
    return report(
        registers=int(used.group(1)),
        spill_bytes=stores + loads,
        stack_bytes=stack,
        shared_bytes=compiled.metadata.shared,
        **_instructions(launch, compiled.asm["cubin"]),
        unordered=bool(launch.constants.get("OVERLAPPING")) and sass.writes_before_all_is_read(compiled.asm["ptx"]),
    )


def _instructions(launch: KernelLaunch, cubin: bytes) -> dict[str, Any]:
    """The figures of a report; none for kernels without a limit."""
    if launch.kernel not in INSTRUCTIONS:
        return {}
    program = sass.disassemble(cubin)
    most = INSTRUCTIONS[launch.kernel] + PER_TOKEN_INSTRUCTIONS * bool(launch.constants.get("PER_TOKEN"))
    a_tile = program.loops[0]
    return {
        "instructions": a_tile * 32 * launch.warps / launch.constants["BLOCK"],
        "most_instructions": most,
        "other_instructions": program.length - a_tile,
    }


def compile_all(chosen: list[KernelLaunch], architectures: list[int], processes: int) -> list[Report]:
    """Reports in the order of `chosen`, each for every architecture."""
    tasks = [(launch, arch) for launch in chosen for arch in architectures]
    with workers(processes) as pool:
        return list(pool.map(compile_launch, *zip(*tasks, strict=True), chunksize=4))


def workers(processes: int) -> concurrent.futures.ProcessPoolExecutor:
    """Processes to compile in, which end when this one does, however that happens."""
    # A forked child would share the state of torch's threads.
    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(processes, context, initializer=_end_with_parent)


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def table(reports: list[Report], limits: dict[str, int]) -> str:
    """One line a report."""
    lines = [
        f"{'kernel':<19} {'arch':<6} {'warps':>5} {'registers':>9} {'limit':>5} {'spill B':>7} {'stack B':>7} "
        f"{'shared KiB':>10} {'instructions a token':>20} {'limit':>5} {'once':>5}  configuration"
    ]
    for r in reports:
        numbers = f"{r.registers:>9} {limits[r.kernel]:>5} {r.spill_bytes:>7} {r.stack_bytes:>7}"
        counted = (f"{r.instructions:.0f}", r.most_instructions, r.other_instructions) if r.instructions else "---"
        lines.append(
            f"{r.kernel:<19} sm_{r.arch:<3} {r.warps:>5} {numbers} {r.shared_bytes / 1024:>10.1f} "
            "{:>20} {:>5} {:>5}  ".format(*counted)
            + r.configuration
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels.aot", description=__doc__)
    parser.add_argument("--arch", nargs="+", type=int, default=list(ARCHITECTURES), help="compute capabilities x 10")
    parser.add_argument("--quick", action="store_true", help="default configurations only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there too")
    parser.add_argument("--limit", action="append", default=[], metavar="KERNEL=REGISTERS", help="another limit")
    parser.add_argument("--tile", metavar="BLOCK:RUN[:REGISTERS]", help="tokens of the loss's tiles and of its threads")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    options = parser.parse_args(argv)
    limits = dict(REGISTERS)
    for entry in options.limit:
        kernel, _, number = entry.partition("=")
        if kernel not in limits or not number.isdigit():
            parser.error(f"--limit {entry}: expected KERNEL=REGISTERS with one of {', '.join(limits)}")
        limits[kernel] = int(number)
    if options.tile and not re.fullmatch(r"\d+:\d+(:\d+)?", options.tile):
        parser.error(f"--tile {options.tile}: expected BLOCK:RUN or BLOCK:RUN:REGISTERS, such as 256:8")
    if min(options.arch) < 80:
        parser.error(f"--arch {min(options.arch)}: the kernels need compute capability 8.0, so 80 or more")
    if importlib.util.find_spec("triton") is None:
        parser.error("triton is not installed: pip install triton (needed to compile, no GPU is)")
    if dispatch.interpreting():
        parser.error("TRITON_INTERPRET is set, so triton interprets kernels instead of compiling them: unset it")

    chosen = launches(quick=options.quick)
    if options.tile:
        chosen = [with_tile(launch, options.tile) for launch in chosen]
    reports = compile_all(chosen, options.arch, options.processes)
    failures = [line for report in reports for line in report.failures(limits)]
    version = importlib.metadata.version("triton")
    print(table(reports, limits))
    if options.json:
        rows = [dataclasses.asdict(r) | {"limit": limits[r.kernel], "failures": r.failures(limits)} for r in reports]
        content = {"triton": version, "shared_limit_bytes": SHARED_BYTES, "kernels": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    print(f"\ntriton {version}: {len(chosen)} launches x {len(options.arch)} architectures, {len(failures)} failures")
    for line in failures:
        print(line, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
