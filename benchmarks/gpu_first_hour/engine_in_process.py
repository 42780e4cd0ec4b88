"""One `RolloutEngine` in this process, without Ray: generate, sleep, take weights from a second process, generate.

The first sign of life of the CUDA path, and where a debugger reaches. On a CPU the engine does not sleep, and the
weights go over TCP instead of CUDA IPC; `rollout.weights.transport` names another way.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_first_hour import reference
from ctpo_megatron.config import Config, choose_transport
from ctpo_megatron.data import Prompt, Trajectory
from ctpo_megatron.engines import EngineSpec, GroupTask, RolloutEngine, Sampling
from ctpo_megatron.engines.weights import EngineFacts, TransportSettings, open_transport
from ctpo_megatron.engines.weights.checksums import different

ADDRESS = "127.0.0.1"
FAILED = "failed"
UPDATE_S = 120.0
"""For one call of the second process."""


def main() -> None:
    """Write the figures as JSON to `--out`; raises if the engine does not hold what it was sent."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_first_hour.engine_in_process", description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--model", type=Path, help="Hugging Face directory; without one a random model is made")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = reference.quickstart(Path(folder), options.device, options.model, options.overrides)
        try:
            figures = asyncio.run(measure(config, options.device, Path(folder)))
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # at once: threads of the engine may wait for what never comes
    options.out.write_text(json.dumps(figures) + "\n")


async def measure(config: Config, device: str, logs: Path) -> dict[str, Any]:
    """Seconds and GPU memory of each part, and |log-prob difference| (nats) before and after the update."""
    model, prompts = reference.truth(config), reference.prompts_of(config)
    transport = choose_transport(config.rollout.weights, config.placement, device)
    figures: dict[str, Any] = {"transport": transport}
    spec = EngineSpec(config, "unused", logs, device=device, transport=transport)  # one turn: no tool is called
    # As in an actor: this process has threads, which a fork would lose.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    with _own_output():
        engine = RolloutEngine(0, spec, ADDRESS)

    async def timed(name: str, action: Awaitable[Any]) -> Any:
        began = time.perf_counter()
        result = await action
        figures[f"{name}_s"] = time.perf_counter() - began
        if device == "cuda":
            free, total = torch.cuda.mem_get_info()
            figures[f"used_after_{name}_gib"] = (total - free) / 2**30
        print(f"{name}: {figures[f'{name}_s']:.2f} s", flush=True)
        return result

    async def sample(version: int) -> None:
        trajectories = await timed(f"sample_{version}", _sample(engine, prompts, version))
        figures[f"tokens_per_s_{version}"] = reference.sampled_tokens(trajectories) / figures[f"sample_{version}_s"]
        figures.update(reference.accuracy(model, trajectories, version))

    facts = await timed("start", engine.start())
    await sample(0)
    with _second_process(config, facts, device) as pipe:
        if device == "cuda":
            await timed("sleep", engine.sleep(2))
            await timed("wake_weights", engine.wake_up(["weights"]))
        pipe.send(None)
        await timed("update", _serve(engine, pipe, 1))
        if device == "cuda":
            await timed("wake_cache", engine.wake_up(["kv_cache"]))
    reference.move(model)
    await sample(1)
    with suppress(TimeoutError):  # as of the pool: a slow end is no failure
        await engine.shutdown()
    return figures


async def _sample(engine: RolloutEngine, prompts: list[Prompt], version: int) -> list[Trajectory]:
    samples = tuple(range(reference.SAMPLES))
    tasks = [GroupTask(prompt, version, samples, Sampling()) for prompt in prompts]
    groups = await asyncio.gather(*(engine.run_group(task, version) for task in tasks))
    return [trajectory for group in groups for trajectory in group]


@contextmanager
def _own_output() -> Iterator[None]:
    """Take back the output that an engine sends to its own log: here the log of the stage has everything."""
    kept = [os.dup(handle) for handle in (1, 2)]
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for handle, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, handle)
            os.close(copy)


@contextmanager
def _second_process(config: Config, facts: EngineFacts, device: str) -> Iterator[Connection]:
    """A trainer that has changed weights and sends them once it is told to; it is ready when this returns."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=send_weights, args=(theirs, config, facts, device), daemon=True)
    process.start()
    theirs.close()
    try:
        _receive(ours)
        yield ours
    finally:
        ours.close()
        process.join(UPDATE_S)
        process.kill()


def _receive(pipe: Connection) -> Any:
    if not pipe.poll(UPDATE_S):
        raise TimeoutError(f"the process with the weights has said nothing for {UPDATE_S:g} s")
    return pipe.recv()


async def _serve(engine: RolloutEngine, pipe: Connection, version: int) -> None:
    """Do what the second process asks of the engine, until the engine reports what it has, which has to be the same."""
    received = None
    while (call := await asyncio.to_thread(_receive, pipe))[0] != "sums":
        method, *arguments = call
        if method == FAILED:
            raise RuntimeError(f"the process with the weights failed:\n{arguments[0]}")
        result = await getattr(engine, method)(*arguments)
        received = result or received
        pipe.send(method)
    assert received is not None and await engine.ping() == str(version)
    if wrong := [name for sums in received for name in different(call[1], sums)]:
        raise RuntimeError(f"the engine has received other values than it was sent in {', '.join(wrong[:5])}")
    print("sums agree", flush=True)


def send_weights(pipe: Connection, config: Config, facts: EngineFacts, device: str) -> None:
    """The second process: the moved weights as version 1, by CUDA IPC or our transports; their sums in the end."""
    try:
        _send_weights(pipe, config, facts, device)
    except Exception:
        pipe.send((FAILED, traceback.format_exc()))


def _send_weights(pipe: Connection, config: Config, facts: EngineFacts, device: str) -> None:
    source = reference.OneRank(reference.move(reference.truth(config)), device, facts.dtype)
    if device == "cuda":
        torch.cuda.synchronize()

    pipe.send("ready")
    _receive(pipe)
    ranks: Any = source
    pool: Any = Pool(pipe)
    settings = TransportSettings.of(config.rollout.weights)
    transport = open_transport(ranks, facts, settings, source.manifest(), pool)
    message = transport.announce(1)
    if message is not None:
        pool.lead("start_weight_update")
        pipe.send(("receive_weights", message))
    sums = transport.send(source.tensors.items(), 1)
    if message is not None:
        _receive(pipe)
        pool.lead("finish_weight_update", lambda _: [1])
    pipe.send(("sums", sums))
    transport.close()


class Pool:
    """The pool as a transport that leads its engines sees it: one engine, at the other end of a pipe."""

    members = ("engine",)

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def lead(self, method: str, arguments: Any = lambda _: (), abort: Any = None) -> list[str]:
        """Have the engine do it; returns when it has."""
        self._pipe.send((method, *arguments(0)))
        _receive(self._pipe)
        return []


if __name__ == "__main__":
    main()
