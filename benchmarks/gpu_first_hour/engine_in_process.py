"""One `RolloutEngine` in this process, without Ray: generate, sleep, take weights from a second process, generate.

The first sign of life of the CUDA path, and where a debugger reaches. On a CPU the engine does not sleep, and the
weights go by a file instead of CUDA IPC; `rollout.weights.transport` names another way.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_first_hour import reference
from ctpo_megatron.config import Config, choose_transport
from ctpo_megatron.data import Prompt, Trajectory
from ctpo_megatron.engines import GroupTask, Sampling
from ctpo_megatron.engines.engine import RolloutEngine
from ctpo_megatron.engines.tasks import EngineSpec
from ctpo_megatron.engines.weights import EngineFacts, TransportSettings, open_transport
from ctpo_megatron.engines.weights.checksums import Checksums, Part, Sums, differences

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
    transport = choose_transport(config.rollout.weights, config.placement, device, cluster=False)
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

    _, facts = await timed("start", engine.start())
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
    tasks = [GroupTask(prompt, version, samples, Sampling(), version=version) for prompt in prompts]
    outcomes = await asyncio.gather(*map(engine.run_group, tasks))
    return [trajectory for outcome in outcomes for trajectory in outcome.trajectories or ()]


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
    report = None
    while (call := await asyncio.to_thread(_receive, pipe))[0] != "sums":
        method, *arguments = call
        if method == FAILED:
            raise RuntimeError(f"the process with the weights failed:\n{arguments[0]}")
        result = await getattr(engine, method)(*arguments)
        report = result or report
        pipe.send(method)
    assert report is not None and report.version == str(version), report
    wrong, unchecked = differences((Part(*part) for part in report.parts), call[1])
    if wrong:
        raise RuntimeError(f"the engine keeps other values than it was sent in {', '.join(wrong[:5])}")
    print(f"checksums agree; not compared: {unchecked or 'none'}", flush=True)


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
    send = _by_ipc if facts.transport == "ipc" else _by_ours
    pipe.send(("sums", send(source, facts, TransportSettings.of(config.rollout.weights), pipe)))


def _by_ours(source: reference.OneRank, facts: EngineFacts, settings: TransportSettings, pipe: Connection) -> Sums:
    """By file or tcp: the engine fetches by itself, once it was told."""

    class Update:
        nodes = (ADDRESS,)

        def tell(self, message: dict[str, Any], own: Sequence[dict[str, Any]] = ({},)) -> None:
            pipe.send(("update_weights", message | own[0], 1))

    update: Any = Update()
    offer = open_transport(source, facts, settings).offer(source, 1)
    try:
        offer.begin(update)
        offer.transfer()
        _receive(pipe)
        offer.end()
        return offer.sums
    finally:
        offer.close()


def _by_ipc(source: reference.OneRank, facts: EngineFacts, settings: TransportSettings, pipe: Connection) -> Sums:
    """As `weights.vllm` and `WeightClient` do it through Ray."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    checksums = Checksums(1, facts.dtype)
    shapes = source.weight_shapes()

    class Source(WeightSource):
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(name, dtype, shape) for name, shape, dtype in shapes]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return checksums.watch(source.weights())

    def call(method: str, *arguments: Any) -> None:
        pipe.send((method, *arguments))
        _receive(pipe)

    class Client:
        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            call("init_weight_transfer", init_info)

        def start_weight_update(self) -> None:
            call("start_weight_update")

        def update_weights(self, update_info: dict[str, Any]) -> None:
            pickled = base64.b64encode(pickle.dumps(update_info["ipc_handles"])).decode()
            call("receive_weights", update_info | {"ipc_handles": None, "ipc_handles_pickled": pickled})

        def finish_weight_update(self, weight_version: str | None = None) -> None:
            call("finish_weight_update", 1)

    largest = max(tensor.nbytes for _, tensor in source.weights())
    size = max(settings.bucket_bytes, largest)
    info = IPCTrainerInitInfo(packed=True, packed_buffer_size_bytes=size, rank=0)
    client: Any = Client()
    WeightTransferTrainerFactory.trainer_init(info, client=client, source=Source()).send_weights()
    return checksums.sums


if __name__ == "__main__":
    main()
