"""vLLM's engine core in the process that uses it, against others, on a CPU, in turns.

    PYTHONPATH=.:kernels python -m benchmarks.engine_process [--rounds 7] [--quick] [--out benchmarks/results]

All sides are `AsyncLLM` with the arguments of a run, in a process each: as we run it, without what saves work in each
step (`in_process_engine` alone), and with the core in a process of its own. They play the same two-turn
conversations with a Qwen3 of the quickstart's size: 256 at once, about 80 sampled tokens each, after an update of the
weights in each round. The tokens must be equal but for one conversation in a hundred, as norms are rounded otherwise.
CPU-seconds and memory (PSS) are those of the process and of what it started.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import psutil

from benchmarks.kernels import report
from benchmarks.measured import spread
from ctpo_megatron.config.schema import Config
from ctpo_megatron.engines.cpu import CpuSetup

OURS, PLAIN, OF_VLLM = "in the actor, lean", "in the actor", "a process of its own"
UNITS = {"cpu": "CPU-seconds", "wall": "seconds", "memory": "memory"}
_VOCABULARY, _DEADLINE_S = 512, 300.0
_MAY_DIFFER = 0.01
"""Share of the conversations of a round."""


def make_model(path: Path) -> None:
    """A random Qwen3 of the quickstart's size, without a tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512}
    Qwen3ForCausalLM(Qwen3Config(vocab_size=_VOCABULARY, **sizes, **heads)).save_pretrained(path)


def configuration(path: Path) -> Config:
    """With the quickstart's engine."""
    engine = {"max_model_len": 512, "max_num_seqs": 256, "dtype": "float32", "kv_cache_mb": 256, "threads": 1}
    return Config.model_validate(
        {
            "run": {"name": "benchmark", "steps": 1},
            "model": {"path": str(path)},
            "data": {"train": ["none"]},
            "rollout": {"engine": engine},
        }
    )


def of_this_tree() -> tuple[float, float]:
    """CPU-seconds, and MiB of memory, of this process and its children."""
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    pss = sum(process.memory_full_info().pss for process in (me, *me.children(recursive=True)))
    return sum(each.user + each.system for each in times), pss / (1 << 20)


def side(name: str, path: str, conversations: int, pipe: Connection) -> None:
    """A process of one side: start, then a round for every number received."""
    config = configuration(Path(path))
    os.environ.update(CpuSetup().environment(config.rollout.engine))
    asyncio.run(_side(name, config, path, conversations, pipe))


async def take_weights(llm: Any, path: str) -> None:
    """As at every training step; the same ones."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    await llm.pause_generation(mode="keep", clear_cache=True)
    await llm.start_weight_update()
    await llm.update_weights(WeightTransferUpdateRequest(update_info={"path": f"{path}/model.safetensors"}))
    await llm.finish_weight_update()
    await llm.resume_generation()


async def _side(name: str, config: Config, path: str, conversations: int, pipe: Connection) -> None:
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from ctpo_megatron.engines.cpu.core_client import in_process_engine
    from ctpo_megatron.engines.weights.receiver import FILE

    arguments = CpuSetup().arguments(config, path) | {"skip_tokenizer_init": True}
    settings = AsyncEngineArgs(weight_transfer_config=WeightTransferConfig(backend=FILE), **arguments)
    if name == OF_VLLM:
        llm = AsyncLLM.from_engine_args(settings)
    elif name == OURS:
        llm = CpuSetup().make(settings, config.rollout.engine)
    else:
        llm = in_process_engine(settings, threads=1, gather=False)
    pipe.send(of_this_tree()[0])

    async def play(number: int, round_number: int) -> list[int]:
        # Eight conversations share a prompt, as the samples of a group do.
        ids = [Random(f"{round_number}/{number // 8}").randrange(_VOCABULARY) for _ in range(30)]
        for turn in (1, 2):
            params = SamplingParams(
                max_tokens=25 + number % 30,
                seed=number * 2 + turn,
                ignore_eos=True,
                detokenize=False,
                logprobs=0,
                flat_logprobs=True,
                output_kind=RequestOutputKind.FINAL_ONLY,
                skip_clone=True,
            )
            async for output in llm.generate(tokens_input(list(ids)), params, f"{round_number}-{number}-{turn}"):
                ids += [*output.outputs[0].token_ids, 7, 8, 9]
        return ids

    while (round_number := await asyncio.to_thread(pipe.recv)) is not None:
        await take_weights(llm, path)
        before, began = of_this_tree()[0], time.perf_counter()
        tokens = await asyncio.gather(*(play(number, round_number) for number in range(conversations)))
        wall = time.perf_counter() - began
        after, memory = of_this_tree()
        pipe.send({"wall": wall, "cpu": after - before, "memory": memory, "tokens": tokens})
    llm.shutdown()


def answer(pipe: Connection, name: str) -> Any:
    """What a side says. Raises TimeoutError when it says nothing."""
    if not pipe.poll(_DEADLINE_S):
        raise TimeoutError(f"the engine in {name} has said nothing for {_DEADLINE_S:g} s")
    return pipe.recv()


def run(conversations: int, rounds: int) -> dict[str, Any]:
    """Seconds of each side and round. Raises RuntimeError when the sides differ in too many conversations."""
    load, spawn = os.getloadavg()[0], multiprocessing.get_context("spawn")
    found: dict[str, list[dict[str, float]]] = {OURS: [], PLAIN: [], OF_VLLM: []}
    differing = 0
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        make_model(Path(folder))
        pipes, start = {}, {}
        for name in found:
            pipes[name], theirs = spawn.Pipe()
            process = spawn.Process(target=side, args=(name, folder, conversations, theirs))
            process.start()
            theirs.close()  # `recv` fails when the process has ended
            stack.callback(process.join, 30.0)
            stack.callback(pipes[name].send, None)
            start[name] = answer(pipes[name], name)
        for number in range(rounds + 1):
            tokens = []
            for name in list(found)[:: 1 if number % 2 else -1]:
                pipes[name].send(number)
                said = answer(pipes[name], name)
                tokens.append(said.pop("tokens"))
                if number:  # the first round warms up
                    found[name].append(said)
            different = sum(any(each != alike[0] for each in alike) for alike in zip(*tokens, strict=True))
            if different > conversations * _MAY_DIFFER:
                raise RuntimeError(f"round {number}: the sides sampled different tokens in {different} conversations")
            differing += different
    settings = {
        "conversations": conversations,
        "rounds": rounds,
        "differing": differing,
        "start_cpu": start,
        "load": load,
    }
    return {"found": found, **settings, "environment": report.environment("cpu", 1)}


def text(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    rows = []
    for name, rounds in result["found"].items():
        middle = {key: statistics.median(each[key] for each in rounds) for key in ("cpu", "wall", "memory")}
        figures = (f"{middle['cpu']:.2f}", f"{middle['wall']:.2f}", f"{middle['memory']:.0f}")
        rows.append((name, *figures, f"{result['start_cpu'][name]:.1f}"))
    spans = []
    for other, (key, unit) in product((PLAIN, OF_VLLM), UNITS.items()):
        pairs = zip(result["found"][OURS], result["found"][other], strict=True)
        spans.append((other, unit, spread([ours[key] / theirs[key] for ours, theirs in pairs])))
    return "\n\n".join(
        [
            "# vLLM's engine core in the actor, with and without what saves work, or in a process of its own",
            f"{result['conversations']} conversations of two turns at once, a Qwen3 of the quickstart's size, one "
            f"thread each. {result['rounds']} rounds in alternating order, each with new weights, after one that is "
            f"not counted. Medians. The sides sampled the same tokens but in {result['differing']} of "
            f"{result['conversations'] * (result['rounds'] + 1)} conversations.",
            report.markdown(["engine core", "CPU-s a round", "seconds a round", "MiB (PSS)", "CPU-s to start"], rows),
            report.markdown(["in the actor, lean / other", "of", "median (least to most)"], spans),
            f"{report.describe(result['environment'])} Load average of a minute before it began: {result['load']:.1f}.",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine_process", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="16 conversations and one round, to see that it works")
    parser.add_argument("--out", type=Path, help="folder for engine_process.json and engine_process.md")
    options = parser.parse_args(argv)
    result = run(*((16, 1) if options.quick else (256, options.rounds)))
    print(text(result))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "engine_process.json").write_text(json.dumps(result, indent=1) + "\n")
        (options.out / "engine_process.md").write_text(text(result) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
