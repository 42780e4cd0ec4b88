"""Weights over TCP to several engines of one node, which receive once and share, against a single engine, in turns.

    PYTHONPATH=.:kernels torchrun --nproc-per-node 5 -m benchmarks.node_weights [--mib 256] [--rounds 15] [--out FOLDER]

Rank 0 sends over loopback, the other ranks receive as vLLM's workers do, without vLLM. A round is an update: from when
rank 0 begins to copy its tensors, with checksums, until the last receiver has read a number of every page. Loopback is
as fast as the cores that copy for both sides. A link between nodes is played: a bucket is not sent before the link had
time for it and for all that was sent earlier.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.kernels import report
from ctpo_megatron.base.tensor_rows import TensorRows
from ctpo_megatron.engines.weights.checksums import Checksums
from ctpo_megatron.engines.weights.tcp import SECRET_BYTES, FetchMessage, fetched
from ctpo_megatron.engines.weights.tcp_transport import WeightMemory, WeightServer

GOAL = 1.3
"""Time of four engines against one, at most."""
RECEIVERS = (1, 2, 4)
LINKS_GBIT_S = (0.0, 10.0, 1.0)
"""0: loopback as it is."""
_TENSOR_MIB, _BUCKET_BYTES, _PAGE = 4, 16 << 20, 4096


class LinkedMemory(WeightMemory):
    """Behind a link of `link_gbit_s` (0: no limit). requested: bytes that were sent or are about to be."""

    def __init__(self, link_gbit_s: float = 0.0) -> None:
        super().__init__()
        self.requested, self._link_gbit_s, self._free_at = 0, link_gbit_s, 0.0

    def content(self, first: int, size: int) -> memoryview:
        """As `WeightMemory.content`, once the link has had time for it; the server asks for one range at a time."""
        self.requested += size
        if self._link_gbit_s:
            self._free_at = max(self._free_at, time.perf_counter()) + 8 * size / (self._link_gbit_s * 1e9)
            time.sleep(max(0.0, self._free_at - time.perf_counter()))
        return super().content(first, size)


def touch(tensor: torch.Tensor) -> float:
    """The sum of a number of every page."""
    return float(tensor.flatten()[:: _PAGE // tensor.element_size()].sum())


def job(mib: int, receivers: Sequence[int], rounds: int, link_gbit_s: float = 0.0) -> dict[str, Any] | None:
    """Rank 0 sends `mib` MiB to as many of the other ranks as `receivers` says, in turns; for every rank of a job.

    Returns on rank 0 `seconds` and bytes `sent` by number of receivers, each a list of the rounds. Raises RuntimeError
    when other numbers arrive.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    if dist.get_rank():
        return _receive(len(receivers) * (rounds + 1))
    return _send(mib, receivers, rounds, LinkedMemory(link_gbit_s))


def _send(mib: int, receivers: Sequence[int], rounds: int, memory: LinkedMemory) -> dict[str, Any]:
    tensors = [torch.randn(_TENSOR_MIB << 8, 1 << 10) for _ in range(mib // _TENSOR_MIB)]
    rows = [TensorRows.whole(f"layers.{n}.weight", tuple(t.shape), t.dtype) for n, t in enumerate(tensors)]
    expected = sorted(touch(tensor) for tensor in tensors)
    secret = secrets.token_bytes(SECRET_BYTES)
    server = WeightServer("127.0.0.1", secret, 60.0)
    found: dict[str, Any] = {what: {count: [] for count in receivers} for what in ("seconds", "sent")}
    for number in range(rounds + 1):
        for count in receivers[:: 1 if number % 2 else -1]:
            memory.requested = 0
            dist.barrier()
            began = time.perf_counter()
            memory.plan(rows, memory.version + 1)
            server.serve(memory)
            shares: Any = [(*server.address, memory.entries)]
            message = FetchMessage(shares, secret.hex(), memory.version, _BUCKET_BYTES, 60.0, 0, count, count)
            message.meeting = secrets.token_hex(16)
            dist.broadcast_object_list([message])
            memory.fill(zip(rows, tensors, strict=True), Checksums(memory.version, torch.bfloat16))
            taken: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(taken, None)
            took = time.perf_counter() - began
            if taken[1 : count + 1] != [expected] * count:
                raise RuntimeError("other numbers arrived")
            if number:  # the first round makes memory
                found["seconds"][count].append(took)
                found["sent"][count].append(memory.requested)
    server.close()
    return found


def _receive(times: int) -> None:
    number = dist.get_rank() - 1
    for _ in range(times):
        dist.barrier()
        box: list[Any] = [None]
        dist.broadcast_object_list(box)
        message: FetchMessage = box[0]
        message.number = number
        takes_part = number < message.of
        taken = sorted(touch(tensor) for _, tensor in fetched(message)) if takes_part else None
        dist.all_gather_object([None] * dist.get_world_size(), taken)


def text(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    rows, of_four = [], {}
    for link, found in result["links"].items():
        name = f"{link:g} Gbit/s" if link else "loopback"
        for count, seconds in found["seconds"].items():
            ratios = [several / one for one, several in zip(found["seconds"][1], seconds, strict=True)]
            of_four[link] = statistics.median(ratios)  # the last is that of most receivers
            span = f"{of_four[link]:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            sent = f"{max(found['sent'][count]) / 2**20:.0f}"
            rows.append((name, str(count), f"{statistics.median(seconds):.3f}", sent, span))
    verdicts = [f"over a link of {link:g} Gbit/s {_met(ratio)}" for link, ratio in of_four.items() if link]
    return "\n\n".join(
        [
            "# Weights to the engines of one node over TCP",
            f"{result['mib']} MiB in tensors of {_TENSOR_MIB} MiB, float32; buckets of {_BUCKET_BYTES >> 20} MiB. "
            f"{result['rounds']} rounds in alternating order, after one that is left out. In a round rank 0 copies its "
            "tensors with checksums and sends, and each receiver reads a number of every page. All processes share the "
            "cores of one machine. A link is played by the sender.",
            report.markdown(["link", "receivers", "seconds (median)", "MiB sent", "against one (range)"], rows),
            f"Goal: four receivers take at most {GOAL:g} times as long as one: {', '.join(verdicts)}.",
            f"{report.describe(result['environment'])} Load average of a minute before it began: {result['load']:.1f}.",
        ]
    )


def _met(ratio: float) -> str:
    return f"{'met' if ratio <= GOAL else 'missed'} ({ratio:.2f})"


def main(argv: list[str] | None = None) -> int:
    """The command line of every rank; exit status 0 also when the goal is missed: the text says it."""
    parser = argparse.ArgumentParser(prog="torchrun --nproc-per-node 5 -m benchmarks.node_weights", description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="folder for node_weights.json and node_weights.md")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    links = {link: job(options.mib, RECEIVERS, options.rounds, link) for link in LINKS_GBIT_S}
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank:
        return 0
    settings = {"mib": options.mib, "rounds": options.rounds, "load": load}
    result = {"links": links, **settings, "environment": report.environment("cpu", 1)}
    print(text(result))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "node_weights.json").write_text(json.dumps(result, indent=1) + "\n")
        (options.out / "node_weights.md").write_text(text(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
