"""Compile every Triton kernel without a GPU and hold its registers, spills and shared memory against limits.

`python -m ctpo_kernels.aot [--arch 80 90 100] [--quick] [--json FILE]` prints a table and exits with 1 if a kernel
spills, exceeds a limit or does not compile, with 2 if nothing can be compiled here. The configurations are those of the
launchers themselves: they run on CPU tensors with a recorder in the place of the kernels.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import importlib
import importlib.metadata
import importlib.util
import inspect
import io
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ctpo_kernels import dispatch
from ctpo_kernels.packed import PackedTokens
from ctpo_kernels.rows_torch import Shard
from ctpo_kernels.spec import LossKeywords, LossSpec

ARCHITECTURES = (80, 90, 100)

# Registers a thread. A multiprocessor has 65536: under these limits two programs of 8 warps (segments) or four of 4
# (tiles) fit side by side, and two of 16 warps for the rows, so that one computes while another waits for memory.
REGISTERS = {
    "segment_kernel": 128,
    "tile_kernel": 128,
    "tile_totals_kernel": 96,
    "reduce_kernel": 128,
    "row_stats_kernel": 64,
    "gradient_kernel": 64,
    "merge_kernel": 128,
}
SHARED_BYTES = 16 << 10
"""Shared memory of any kernel: only reductions and scans use it."""

_TYPES = {
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel as a launcher calls it.

    module: where the kernel is. signature, constants: by argument name. divisible: arguments that are multiples of 16.
    options: what the launcher passes beside the arguments (num_warps, ...).
    """

    kernel: str
    module: str
    configuration: str
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[str, ...]
    options: dict[str, Any]

    @property
    def warps(self) -> int:
        """Warps of one program."""
        return self.options["num_warps"]


@dataclasses.dataclass(frozen=True)
class Report:
    """What the assembler says of one launch on one architecture; `error` is empty where it compiled."""

    kernel: str
    configuration: str
    arch: int
    warps: int
    registers: int = 0
    spill_bytes: int = 0
    stack_bytes: int = 0
    shared_bytes: int = 0
    error: str = ""

    def failures(self, limits: dict[str, int]) -> list[str]:
        """Everything that is wrong with it, one line each."""
        where = f"{self.kernel} ({self.configuration}) on sm_{self.arch}"
        if self.error:
            return [f"{where} does not compile: {self.error}"]
        limit = limits[self.kernel]
        checks = (
            (self.registers > limit, f"{self.registers} registers, limit {limit}"),
            (self.spill_bytes > 0, f"spills {self.spill_bytes} bytes"),
            (self.stack_bytes > 0, f"has a stack frame of {self.stack_bytes} bytes"),
            (self.shared_bytes > SHARED_BYTES, f"{self.shared_bytes} bytes of shared memory, limit {SHARED_BYTES}"),
        )
        return [f"{where}: {text}" for failed, text in checks if failed]


class _Recorder:
    """Takes the place of a module of kernels and notes launches instead of making them."""

    def __init__(self, module: ModuleType, launches: list[tuple[Any, dict[str, Any]]]) -> None:
        self._module, self._launches = module, launches

    def __getattr__(self, name: str) -> _RecordedKernel:
        return _RecordedKernel(getattr(self._module, name), self._launches)


class _RecordedKernel:
    """`kernel[grid](...)` without a launch."""

    def __init__(self, kernel: Any, launches: list[tuple[Any, dict[str, Any]]]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._note

    def _note(self, *given: Any, **named: Any) -> None:
        positional = dict(zip(self._kernel.arg_names[: len(given)], given, strict=True))
        self._launches.append((self._kernel, positional | named))


@contextlib.contextmanager
def _recording() -> Iterator[list[tuple[Any, dict[str, Any]]]]:
    from ctpo_kernels import loss_kernels, loss_triton, rows_kernels, rows_triton

    launches: list[tuple[Any, dict[str, Any]]] = []
    loss_triton.kernels, rows_triton.kernels = _Recorder(loss_kernels, launches), _Recorder(rows_kernels, launches)
    try:
        yield launches
    finally:
        loss_triton.kernels, rows_triton.kernels = loss_kernels, rows_kernels


def _describe(kernel: Any, arguments: dict[str, Any], configuration: str) -> Launch:
    """Types and specialisation as a real launch would have them."""
    constexpr = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    divisible = []
    for name in kernel.arg_names:
        value = arguments[name]
        if name in constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name] = "*" + _TYPES[value.dtype]
            if value.data_ptr() % 16 == 0:
                divisible.append(name)
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif isinstance(value, int):
            signature[name] = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
            if value % 16 == 0:
                divisible.append(name)
        else:
            raise TypeError(f"{kernel.__name__}: no type is known for {name} = {value!r}")
    options = {name: value for name, value in arguments.items() if name not in kernel.arg_names}
    module = kernel.fn.__module__
    return Launch(kernel.__name__, module, configuration, signature, constants, tuple(divisible), options)


# Keywords of ctpo_loss (or an argument of _batch); names that begin with "default" are the quick ones.
_LOSSES: dict[str, dict[str, Any]] = {
    "default": {},
    "per-token output": {"per_token": True},
    "on-policy": {"old": False},
    "token weights, masks, advantages": {"masked": True, "weights": "token", "advantages": "token"},
    "sequence weights": {"weights": "sequence"},
    "token-mean, count on device": {"loss_agg_mode": "token-mean"},
    "power 0": {"clip_power": 0.0},
    "power from a table": {"clip_power": 0.3},
    "geomean, power -1/2": {"ratio_mode": "geomean", "clip_power": -0.5},
    "token ratio": {"ratio_mode": "token"},
    "sequence ratio": {"ratio_mode": "sequence"},
    "sequence-geomean ratio": {"ratio_mode": "sequence-geomean"},
    "pieces of sequences": {"pieces": True},
    "pieces, all options": {
        "pieces": True,
        "per_token": True,
        "masked": True,
        "weights": "token",
        "advantages": "token",
        "clip_power": 0.3,
        "ratio_mode": "geomean",
    },
    "sequence ratio of pieces": {"pieces": True, "ratio_mode": "sequence"},
    "int64 masks, int32 boundaries": {"masks": torch.int64, "cu": torch.int32, "masked": True},
}
# Tokens that are no multiple of 16 and aligned ones; one sequence, few, and enough for a program each.
_SIZES = {"1 sequence": (32768, 1), "8 sequences": (32771, 8), "300 sequences": (32768, 300)}


def _batch(
    tokens: int,
    segments: int,
    *,
    old: bool = True,
    masked: bool = False,
    weights: str = "",
    advantages: str = "sequence",
    masks: torch.dtype = torch.bool,
    cu: torch.dtype = torch.int64,
) -> PackedTokens:
    values, ones = torch.zeros(tokens), torch.ones(tokens, dtype=masks)
    per = {"token": values, "sequence": torch.zeros(segments)}
    bounds = torch.linspace(0, tokens, segments + 1).to(cu)
    return PackedTokens.of(
        values, values if old else None, ones, per[advantages], bounds, ones if masked else None, per.get(weights)
    )


def _launch_loss(size: tuple[int, int], options: dict[str, Any], *, stream: bool = False) -> None:
    from ctpo_kernels import loss_triton

    options = dict(options)
    per_token, pieces = options.pop("per_token", False), options.pop("pieces", False)
    shape = {name: options.pop(name) for name in inspect.signature(_batch).parameters if name in options}
    batch, spec = _batch(*size, **shape), LossSpec.of(LossKeywords(**options))
    inverse = spec.inverse_denominator(None, None, batch)
    totals = torch.ones(batch.segments, 4, dtype=torch.int64)
    state = torch.zeros(batch.segments, 3, dtype=torch.int64)
    if stream:
        # The head's second window of three.
        loss = loss_triton.LossStream(batch, spec, inverse, totals=totals if spec.per_sequence else None, state=state)
        loss.step(8192, 16384, torch.zeros(8192))
        loss.finish()
    else:
        given = {"state": state, "totals": totals} if pieces else {}
        loss_triton.loss_pass(batch, spec, inverse, per_token=per_token, **given)


def _launch_rows(columns: int, valid: int, dtype: torch.dtype, *, shards: int, entropy: bool, mixed: bool) -> None:
    from ctpo_kernels import rows_triton

    rows, shard = 16, Shard(0, valid)
    logits = torch.zeros(rows, columns, dtype=dtype)
    labels = torch.zeros(rows, dtype=torch.int64)
    parts = rows_triton.row_stats(logits, labels, shard, 1.0, entropy=entropy)
    merged = rows_triton.merge_stats(parts.repeat(shards, 1, 1), labels, 1.0)
    out = logits.view(torch.bfloat16)[:, :columns] if mixed else logits
    rows_triton.gradient_into(out, logits, merged.lse, labels, merged.entropy, shard, 1.0)


def configurations() -> dict[str, Callable[[], None]]:
    """Name -> launchers of that configuration, on CPU tensors of realistic sizes."""
    found: dict[str, Callable[[], None]] = {}
    for name, options in _LOSSES.items():
        for size in _SIZES:
            if size == "1 sequence" and name != "default":
                continue
            found[f"{name}, {size}"] = lambda size=size, options=options: _launch_loss(_SIZES[size], options)
        if not options.keys() & {"pieces", "per_token"} and not options.get("ratio_mode", "").startswith("sequence"):
            found[f"{name}, streaming head"] = lambda options=options: _launch_loss(
                _SIZES["8 sequences"], options, stream=True
            )
    bf16, fp32 = torch.bfloat16, torch.float32
    for name, (columns, valid, dtype, shards, entropy, mixed) in {
        "default, bf16 logits": (151936, 151936, bf16, 1, False, False),
        "default, fp32 logits, bf16 gradient over them": (151936, 151936, fp32, 1, False, True),
        "fp32 logits, entropy": (151936, 151936, fp32, 1, True, False),
        "bf16 logits, entropy, 8 shards": (18992, 18001, bf16, 8, True, False),
        "fp32 logits, odd vocabulary": (32003, 32001, fp32, 2, True, False),
        "bf16 gradient over fp32, odd vocabulary": (32003, 32001, fp32, 4, False, True),
        "small vocabulary": (512, 500, fp32, 1, False, False),
    }.items():
        found[name] = lambda c=columns, v=valid, d=dtype, s=shards, e=entropy, m=mixed: _launch_rows(
            c, v, d, shards=s, entropy=e, mixed=m
        )
    return found


def launches(*, quick: bool = False) -> list[Launch]:
    """All different launches; `quick`: of the default configurations only.

    Raises LookupError if a kernel of the package is in none of them, or has no limit.
    """
    found: dict[tuple[Any, ...], Launch] = {}
    for name, run in configurations().items():
        if quick and not name.startswith("default"):
            continue
        with _recording() as notes:
            run()
        for kernel, arguments in notes:
            launch = _describe(kernel, arguments, name)
            key = (launch.kernel, *map(repr, (launch.signature, launch.constants, launch.divisible, launch.options)))
            found.setdefault(key, launch)
    missing = _kernels() - {launch.kernel for launch in found.values()}
    if missing or _kernels() != REGISTERS.keys():
        raise LookupError(
            f"kernels in no configuration: {sorted(missing)}; with a limit but gone, or without one: "
            f"{sorted(_kernels() ^ REGISTERS.keys())}"
        )
    return list(found.values())


def _kernels() -> set[str]:
    from triton.runtime.jit import JITFunction

    from ctpo_kernels import loss_kernels, rows_kernels

    return {
        name
        for module in (loss_kernels, rows_kernels)
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and name.endswith("_kernel")
    }


def compile_launch(launch: Launch, arch: int) -> Report:
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
    base = {"kernel": launch.kernel, "configuration": launch.configuration, "arch": arch, "warps": launch.warps}
    try:
        with contextlib.redirect_stdout(log):
            compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.options)
    except Exception as error:
        return Report(**base, error=f"{type(error).__name__}: {error}")
    used = re.search(r"Used (\d+) registers", log.getvalue())
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log.getvalue())
    if used is None or frame is None:
        return Report(**base, error=f"ptxas reported no resources:\n{log.getvalue()}")
    stack, stores, loads = map(int, frame.groups())
    return Report(
        **base,
        registers=int(used.group(1)),
        spill_bytes=stores + loads,
        stack_bytes=stack,
        shared_bytes=compiled.metadata.shared,
    )


def compile_all(chosen: list[Launch], architectures: list[int], processes: int) -> list[Report]:
    """Reports in the order of `chosen`, each for every architecture."""
    tasks = [(launch, arch) for launch in chosen for arch in architectures]
    # A forked child would share the state of torch's threads.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
        return list(pool.map(compile_launch, *zip(*tasks, strict=True), chunksize=4))


def table(reports: list[Report], limits: dict[str, int]) -> str:
    """One line a report."""
    lines = [
        f"{'kernel':<19} {'arch':<6} {'warps':>5} {'registers':>9} {'limit':>5} {'spill B':>7} {'stack B':>7} "
        f"{'shared KiB':>10}  configuration"
    ]
    for r in reports:
        numbers = f"{r.registers:>9} {limits[r.kernel]:>5} {r.spill_bytes:>7} {r.stack_bytes:>7}"
        lines.append(
            f"{r.kernel:<19} sm_{r.arch:<3} {r.warps:>5} {numbers} {r.shared_bytes / 1024:>10.1f}  {r.configuration}"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ctpo_kernels.aot", description=__doc__)
    parser.add_argument("--arch", nargs="+", type=int, default=list(ARCHITECTURES), help="compute capabilities x 10")
    parser.add_argument("--quick", action="store_true", help="default configurations only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there too")
    parser.add_argument("--limit", action="append", default=[], metavar="KERNEL=REGISTERS", help="another limit")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    options = parser.parse_args(argv)
    limits = dict(REGISTERS)
    for entry in options.limit:
        kernel, _, number = entry.partition("=")
        if kernel not in limits or not number.isdigit():
            parser.error(f"--limit {entry}: expected KERNEL=REGISTERS with one of {', '.join(limits)}")
        limits[kernel] = int(number)
    if min(options.arch) < 80:
        parser.error(f"--arch {min(options.arch)}: the kernels need compute capability 8.0, so 80 or more")
    if importlib.util.find_spec("triton") is None:
        parser.error("triton is not installed: pip install triton (needed to compile, no GPU is)")
    if dispatch.interpreting():
        parser.error("TRITON_INTERPRET is set, so triton interprets kernels instead of compiling them: unset it")

    chosen = launches(quick=options.quick)
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
