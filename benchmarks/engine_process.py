"""vLLM's engine core in the process that uses it, against one in a process of its own, on a CPU, in turns.

    PYTHONPATH=.:kernels python -m benchmarks.engine_process [--rounds 7] [--quick] [--out benchmarks/results]

Both sides are `AsyncLLM` with the arguments of a run, in a process each. They play the same two-turn conversations with
a Qwen3 of the quickstart's size: 256 at once, about 80 sampled tokens each. The tokens of both must be equal.
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
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import psutil

from benchmarks.kernels import report
from ctpo_megatron.config.schema import Config
from ctpo_megatron.rollout.tasks import engine_arguments, engine_environment

OURS, OF_VLLM = "in the actor", "a process of its own"
_VOCABULARY, _DEADLINE_S = 2048, 300.0


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
    os.environ.update(engine_environment("cpu", config.rollout.engine))
    asyncio.run(_side(name, config, path, conversations, pipe))


async def _side(name: str, config: Config, path: str, conversations: int, pipe: Connection) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from ctpo_megatron.rollout.in_process import in_process_engine

    arguments = engine_arguments(config, path, "cpu") | {"skip_tokenizer_init": True}
    del arguments["worker_extension_cls"]
    settings = AsyncEngineArgs(**arguments)
    llm = in_process_engine(settings, threads=1) if name == OURS else AsyncLLM.from_engine_args(settings)
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
    """Seconds of each side and round. Raises RuntimeError when the sides sample different tokens."""
    load, spawn = os.getloadavg()[0], multiprocessing.get_context("spawn")
    found: dict[str, list[dict[str, float]]] = {OURS: [], OF_VLLM: []}
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
            if tokens[0] != tokens[1]:
                raise RuntimeError(f"round {number}: the sides sampled different tokens")
    settings = {"conversations": conversations, "rounds": rounds, "start_cpu": start, "load": load}
    return {"found": found, **settings, "environment": report.environment("cpu", 1)}


def text(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    rows = []
    for name, rounds in result["found"].items():
        middle = {key: statistics.median(each[key] for each in rounds) for key in ("cpu", "wall", "memory")}
        figures = (f"{middle['cpu']:.2f}", f"{middle['wall']:.2f}", f"{middle['memory']:.0f}")
        rows.append((name, *figures, f"{result['start_cpu'][name]:.1f}"))
    spans = []
    for key, unit in (("cpu", "CPU-seconds"), ("wall", "seconds"), ("memory", "memory")):
        pairs = zip(result["found"][OURS], result["found"][OF_VLLM], strict=True)
        ratios = [ours[key] / theirs[key] for ours, theirs in pairs]
        spans.append((unit, f"{statistics.median(ratios):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"))
    return "\n\n".join(
        [
            "# vLLM's engine core in the actor, or in a process of its own",
            f"{result['conversations']} conversations of two turns at once, a Qwen3 of the quickstart's size, one "
            f"thread each. {result['rounds']} rounds in alternating order, after one that is not counted. Medians. "
            "Both sides sampled the same tokens.",
            report.markdown(["engine core", "CPU-s a round", "seconds a round", "MiB (PSS)", "CPU-s to start"], rows),
            report.markdown(["in the actor / of its own", "median", "range"], spans),
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
