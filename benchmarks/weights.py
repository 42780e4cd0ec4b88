"""Weights to an engine's process on another Ray node: our TCP transport against Ray's object store, in turns.

    PYTHONPATH=.:kernels python -m benchmarks.weights [--mib 1024] [--rounds 5] [--quick] [--out benchmarks/results]

Two Ray nodes run on this machine, the driver on the first, a receiver on the second, so all bytes go over loopback.
Both sides start with the same tensors in the driver and end when the receiver has read a number of every page of each
tensor. TCP: a copy is made and summed, which the receiver fetches and sums bucket by bucket meanwhile. Ray: `ray.put`
of the tensors as NumPy arrays (which Ray hands over without pickling their bytes), `ray.get` in the receiver, no sums.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from benchmarks.kernels import report
from ctpo_megatron.engines.weights import EngineFacts, Manifest, TransportSettings, WeightTransport, open_transport
from ctpo_megatron.engines.weights.checksums import Checksums
from ctpo_megatron.engines.weights.tcp import FetchMessage, fetched

T = TypeVar("T")
GOAL = 3.0
HOST = "127.0.0.2"
"""Of the loopback; Ray replaces 127.0.0.1 by an address that others can reach."""
_TENSOR_MIB = 8
_PAGE = 4096
_QUIET = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
Sides = dict[str, Callable[[], float]]


def touch(tensor: torch.Tensor) -> float:
    """Read a number of every page."""
    return float(tensor.flatten()[:: _PAGE // tensor.element_size()].sum())


class Receiver:
    """On the other node; every method returns the sum of what it touched, and whether the node is another one."""

    def take_object(self, boxed: list[Any]) -> float:
        import ray

        return sum(touch(torch.from_numpy(array)) for array in ray.get(boxed[0]).values())

    def take_tcp(self, message: FetchMessage) -> float:
        return sum(touch(tensor) for _, tensor in Checksums().watch(fetched(message)))

    def node(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())


class OneRank:
    """A job of one rank, as a transport sees it."""

    rank, pp_rank, is_rank_zero = 0, 0, True

    def on_rank_zero(self, action: Callable[[], T]) -> T:
        return action()

    def gather(self, value: T) -> list[T]:
        return [value]


def sides(receiver: Any, tensors: dict[str, torch.Tensor], bucket_bytes: int) -> tuple[Sides, WeightTransport]:
    """What is timed, by name."""
    import ray

    facts, settings = EngineFacts(torch.float32, HOST, "tcp"), TransportSettings(bucket_bytes, 120.0, HOST)
    manifest = Manifest((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())
    ranks: Any = OneRank()
    transport, versions = open_transport(ranks, facts, settings, manifest, None), itertools.count(1)

    def tcp() -> float:
        version = next(versions)
        taken = receiver.take_tcp.remote(FetchMessage(**transport.announce(version) or {}))
        transport.send(tensors.items(), version)
        return float(ray.get(taken))

    def objects() -> float:
        return float(ray.get(receiver.take_object.remote([ray.put({n: t.numpy() for n, t in tensors.items()})])))

    return {"tcp": tcp, "ray.put and ray.get": objects}, transport


def run(mib: int, rounds: int, bucket_mib: int) -> dict[str, Any]:
    """Seconds of each side and round. Raises RuntimeError when the second node is not there."""
    os.environ |= _QUIET
    import ray
    from ray.cluster_utils import Cluster

    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    node = {"node_ip_address": HOST, "object_store_memory": (3 * mib + 256) << 20}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1, resources={"far": 1.0}, **node)
    ray.init(address=cluster.address, _node_ip_address=HOST, log_to_driver=False, logging_level=40)
    try:
        remote: Any = ray.remote(num_cpus=1, resources={"far": 1.0})(Receiver)
        receiver = remote.remote()
        if ray.get(receiver.node.remote()) == ray.get_runtime_context().get_node_id():
            raise RuntimeError("the receiver is on the driver's node")
        count = mib // _TENSOR_MIB
        tensors = {f"model.layers.{n}.weight": torch.randn(_TENSOR_MIB << 8, 1 << 10) for n in range(count)}
        expected = sum(touch(tensor) for tensor in tensors.values())
        timed, transport = sides(receiver, tensors, bucket_mib << 20)
        seconds: dict[str, list[float]] = {name: [] for name in timed}
        for number in range(rounds + 1):
            for name, side in list(timed.items())[:: 1 if number % 2 else -1]:
                began = time.perf_counter()
                found = side()
                if number:  # the first round makes connections and memory
                    seconds[name].append(time.perf_counter() - began)
                if found != expected:
                    raise RuntimeError(f"{name}: other numbers arrived")
        transport.close()
    finally:
        ray.shutdown()
        cluster.shutdown()
    settings = {"mib": mib, "rounds": rounds, "bucket_mib": bucket_mib, "ray": ray.__version__, "load": load}
    return {"seconds": seconds, **settings, "environment": report.environment("cpu", 1)}


def text(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    seconds: dict[str, list[float]] = result["seconds"]
    against = seconds["ray.put and ray.get"]
    rows, ratios = [], {}
    for name, found in seconds.items():
        ratio = [theirs / ours for theirs, ours in zip(against, found, strict=True)]
        ratios[name] = statistics.median(ratio)
        median = statistics.median(found)
        span = f"{ratios[name]:.2f} ({min(ratio):.2f} to {max(ratio):.2f})"
        rows.append((name, f"{median:.2f}", f"{result['mib'] / 1024 / median:.2f}", span))
    met = "met" if ratios["tcp"] >= GOAL else "missed"
    return "\n\n".join(
        [
            "# Weights to another Ray node: TCP against the object store",
            f"{result['mib']} MiB in tensors of {_TENSOR_MIB} MiB, float32, from a driver to an actor on a second Ray "
            f"node of the same machine (loopback); buckets of {result['bucket_mib']} MiB. {result['rounds']} rounds in "
            "alternating order, after one that is not counted. Medians of the seconds; medians and ranges of a round's "
            "ratios.",
            report.markdown(["side", "seconds", "GiB/s", "times as fast as Ray (range)"], rows),
            f"Goal: tcp at least {GOAL:g} times as fast as ray.put and ray.get: {met} ({ratios['tcp']:.2f}).",
            f"{report.describe(result['environment'])} Ray {result['ray']}. Load average of a minute before it "
            f"began: {result['load']:.1f}.",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """The command line; exit status 0 also when the goal is missed: the text says it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights", description=__doc__)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket-mib", type=int, default=16)
    parser.add_argument("--quick", action="store_true", help="32 MiB and one round, to see that it works")
    parser.add_argument("--out", type=Path, help="folder for weights.json and weights.md")
    options = parser.parse_args(argv)
    result = run(*((32, 1) if options.quick else (options.mib, options.rounds)), options.bucket_mib)
    print(text(result))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "weights.json").write_text(json.dumps(result, indent=1) + "\n")
        (options.out / "weights.md").write_text(text(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
