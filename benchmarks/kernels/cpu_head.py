"""The three heads on a CPU: eager, recomputing, streaming. CPU time of forward + backward and peak memory above inputs.

`python -m benchmarks.kernels.cpu_head [--quick] [--out DIR]`. Every head runs in a process of its own, which keeps its
inputs between rounds; rounds go round all of them, so that a slow minute of the machine meets everyone. Before
anything is timed, losses and gradients of all heads must agree.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ctpo_kernels as ck
from benchmarks.kernels import report

HEADS = ("eager", "recompute", "streaming")
MASKED = (0.0, 0.6)
TOLERANCE = 1e-5
FULL = {"tokens": 4096, "vocabulary": 32000, "hidden": 512, "sequences": 32}
QUICK = {"tokens": 256, "vocabulary": 2000, "hidden": 64, "sequences": 4}


def inputs(shape: dict[str, int], masked: float) -> dict[str, Tensor]:
    """One batch, the same in every process. Its ratios stay near 1, so that no head gains by skipping clipped rows."""
    torch.manual_seed(0)
    n, v, h, b = (shape[name] for name in ("tokens", "vocabulary", "hidden", "sequences"))
    hidden, weight = torch.randn(n, h), torch.randn(v, h) / h**0.5
    labels = torch.randint(0, v, (n,))
    with torch.no_grad():
        log_probs = ck.linear_log_probs(hidden, weight, labels)
    return {
        "hidden": hidden.requires_grad_(),
        "weight": weight.requires_grad_(),
        "labels": labels,
        "old": log_probs + 1e-4 * torch.randn(n),
        "mask": torch.rand(n) >= masked,
        "advantages": torch.randn(b),
        "cu": torch.linspace(0, n, b + 1).to(torch.int64),
    }


def run(head: str, batch: dict[str, Tensor], rows: slice = slice(None), cu: Tensor | None = None) -> float:
    """Forward and backward; gradients are left in `hidden.grad` and `weight.grad`."""
    hidden, weight, labels = batch["hidden"][rows], batch["weight"], batch["labels"][rows]
    cu = batch["cu"] if cu is None else cu
    rest = (batch["old"][rows], batch["mask"][rows], batch["advantages"][: cu.numel() - 1], cu)
    if head == "streaming":
        loss = ck.fused_linear_ctpo(hidden, weight, labels, *rest)[0]
    elif head == "recompute":
        loss = ck.ctpo_loss(ck.linear_log_probs(hidden, weight, labels, mask=rest[1]), *rest)[0]
    else:
        log_probs = torch.log_softmax(hidden @ weight.t(), dim=-1).gather(1, labels[:, None]).squeeze(1)
        loss = ck.ctpo_loss(log_probs, *rest)[0]
    loss.backward()
    return float(loss.detach())


def child(head: str, masked: float, shape: dict[str, int], threads: int) -> None:
    """Obey the parent's lines: "memory" and "time" answer with one JSON line, "save FILE" writes the gradients."""
    torch.set_num_threads(threads)
    batch = inputs(shape, masked)
    # First calls set up thread pools and libraries: they belong to neither figure.
    run(head, batch, slice(0, 16), torch.tensor([0, 16]))
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        batch["hidden"].grad = batch["weight"].grad = None
        before = _settled_memory()
        wall, cpu = time.perf_counter(), time.process_time()
        loss = run(head, batch)
        answer = {
            "cpu_s": time.process_time() - cpu,
            "wall_s": time.perf_counter() - wall,
            "peak_bytes": _memory("VmHWM") - before,
            "loss": loss,
        }
        if command == "save":
            torch.save([batch["hidden"].grad, batch["weight"].grad], argument)
        print(json.dumps(answer), flush=True)


def _memory(name: str) -> int:
    """Bytes of an entry of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}: peak memory is read there (Linux)")


def _settled_memory() -> int:
    """Resident bytes without what malloc keeps for reuse; the recorded peak starts from there."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


class Head:
    """A child process that holds one head and its inputs."""

    def __init__(self, head: str, masked: float, shape: dict[str, int], threads: int) -> None:
        self.name, self.masked = head, masked
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.kernels.cpu_head",
                "--child",
                json.dumps([head, masked, shape, threads]),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, command: str) -> dict[str, float]:
        """One forward and backward."""
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of the {self.name} head ended with status {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def heads(shape: dict[str, int], threads: int) -> Iterator[list[Head]]:
    """All heads, with and without masked rows; their processes end with the block."""
    started: list[Head] = []
    try:
        for masked in MASKED:
            for head in HEADS:
                started.append(Head(head, masked, shape, threads))
        yield started
    finally:
        for head in started:
            head.close()


def agree(started: list[Head], folder: Path) -> dict[str, float]:
    """Largest relative difference of loss and gradients from the eager head's; raises RuntimeError above 1e-5."""
    worst = {"loss": 0.0, "d_hidden": 0.0, "d_weight": 0.0}
    for masked in MASKED:
        same = [head for head in started if head.masked == masked]
        losses, gradients = [], []
        for head in same:
            losses.append(head.ask(f"save {folder / 'gradients.pt'}")["loss"])
            gradients.append(torch.load(folder / "gradients.pt"))
        for head, loss, found in zip(same[1:], losses[1:], gradients[1:], strict=True):
            errors = {"loss": abs(loss - losses[0]) / max(abs(losses[0]), 1e-30)}
            for name, a, b in zip(("d_hidden", "d_weight"), found, gradients[0], strict=True):
                errors[name] = float((a - b).norm() / b.norm())
            for name, error in errors.items():
                if not error <= TOLERANCE:
                    raise RuntimeError(f"{head.name}, {masked:.0%} masked: {name} is off by {error:.1e}")
                worst[name] = max(worst[name], error)
    return worst


def measure(shape: dict[str, int], rounds: int, threads: int) -> dict[str, Any]:
    """Medians over interleaved rounds, one row a head and share of masked rows, and the ratios to eager."""
    with heads(shape, threads) as started, tempfile.TemporaryDirectory() as folder:
        worst = agree(started, Path(folder))
        samples: dict[tuple[str, float], list[dict[str, float]]] = {(h.name, h.masked): [] for h in started}
        for _ in range(rounds):
            for head in started:
                samples[head.name, head.masked].append(head.ask("time"))
    rows = []
    for (name, masked), found in samples.items():
        medians = {key: statistics.median(sample[key] for sample in found) for key in ("cpu_s", "wall_s", "peak_bytes")}
        low, high = (pick(sample["cpu_s"] for sample in found) for pick in (min, max))
        rows.append({"head": name, "masked": masked, **medians, "cpu_s_min": low, "cpu_s_max": high})
    for row in rows:
        eager = next(other for other in rows if other["head"] == "eager" and other["masked"] == row["masked"])
        row["cpu_ratio"] = row["cpu_s"] / eager["cpu_s"]
        row["memory_ratio"] = row["peak_bytes"] / eager["peak_bytes"]
    goals = []
    for row in rows:
        if row["head"] == "streaming":
            goals.append({"masked": row["masked"], "goal": "less CPU time than eager", "met": row["cpu_ratio"] < 1})
            goals.append({"masked": row["masked"], "goal": "1/5 of eager's memory", "met": row["memory_ratio"] <= 0.2})
    return {"shape": shape, "rounds": rounds, "agreement": worst, "rows": rows, "goals": goals}


def text(result: dict[str, Any]) -> str:
    """The result as markdown."""
    shape = result["shape"]
    rows = [
        (
            row["head"],
            f"{row['masked']:.0%}",
            f"{row['cpu_s']:.2f} ({row['cpu_s_min']:.2f} to {row['cpu_s_max']:.2f})",
            f"{row['cpu_ratio']:.2f}",
            f"{row['wall_s']:.2f}",
            f"{row['peak_bytes'] / 1e6:.0f}",
            f"{row['memory_ratio']:.2f}",
        )
        for row in result["rows"]
    ]
    head = ("head", "masked rows", "CPU s, median (range)", "/ eager", "wall s", "peak MB above inputs", "/ eager")
    goals = [(f"{g['masked']:.0%}", g["goal"], "met" if g["met"] else "MISSED") for g in result["goals"]]
    errors = ", ".join(f"{name} {error:.0e}" for name, error in result["agreement"].items())
    return "\n\n".join(
        (
            "# The heads on a CPU: output layer, log-probs, loss, gradients",
            f"N={shape['tokens']} tokens in {shape['sequences']} sequences, V={shape['vocabulary']}, "
            f"H={shape['hidden']}, float32, forward + backward, plain torch backend; median of {result['rounds']} "
            "interleaved rounds, each head in its own process. The peak is of resident memory over its level before "
            "the forward pass and holds the two gradients. Eager: matmul, log_softmax, gather, the same loss. Largest "
            f"relative difference from eager before timing: {errors}.",
            report.markdown(head, rows),
            report.markdown(("masked rows", "goal of the streaming head", "verdict"), goals),
            report.describe(result["environment"]),
        )
    )


def main(argv: list[str] | None = None) -> int:
    """The command line; exit status 0 also when a goal is missed: the table says it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels.cpu_head", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny shape, to see that it works")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder for kernels-cpu-head.json and .md")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        child(*json.loads(options.child))
        return 0
    result = measure(QUICK if options.quick else FULL, options.rounds, options.threads)
    result["environment"] = report.environment("cpu", options.threads)
    print(text(result))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "kernels-cpu-head.json").write_text(json.dumps(result, indent=1) + "\n")
        (options.out / "kernels-cpu-head.md").write_text(text(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
