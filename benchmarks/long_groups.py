"""Long groups first against the order of the batch: seconds until the last group of a batch is complete.

    PYTHONPATH=.:answers:kernels:sandbox:launchers python -m benchmarks.long_groups [--groups 64] [--rounds 5]
        [--latency 0 0.1] [--out benchmarks/results]

One engine plays the same batch twice a round, in alternating order. Once its prompts have ids that were never played,
so all are expected to be equally long, and are begun in the order of the batch. Once they have the ids of the round
before, and those whose answers were longest then are begun first. Both have to make the same turns. How many those are
is log-normal: `SPREAD_PROMPTS` is the sigma between prompts, which can be learned, and `SPREAD_SAMPLES` that between
the answers to one prompt and from round to round, which cannot.

On a CPU a step of the engine takes longer the more sequences it has, so that few at the end cost little. With a
latency of its turns, as of a tool, an answer takes about as long alone as among others.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import string
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from transformers import AutoTokenizer

from benchmarks import runs
from benchmarks.kernels import report
from benchmarks.measured import spread
from ctpo_megatron.base.event_loop import EventLoop
from ctpo_megatron.checks import NodeComparison
from ctpo_megatron.config import Config
from ctpo_megatron.data import Prompt
from ctpo_megatron.data.records import ToolCall
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.engines import GroupTask, Sampling, open_engines
from ctpo_megatron.environments import Episode, Message, Schema, ToolCallRequest, ToolResult, ToolUnavailable
from ctpo_megatron.evaluate import find_target, read_config
from ctpo_megatron.rollouts import GroupSampler
from examples.toolmath import Task, TinyModel, write_task

SAMPLES, PLACES = 4, 16
MEDIAN_TURNS, MOST_TURNS, ROOM = 4.0, 40, 4096
SPREAD_PROMPTS, SPREAD_SAMPLES = 1.0, 0.4
IN_ORDER, LONGEST = "order of the batch", "longest first"

Figures = dict[str, Any]


class LongAnswers:
    """Has the model make the turns that are drawn for the prompt, a number for each of its episodes.

    latency_s: of the answer to each turn.
    """

    def __init__(self, latency_s: float) -> None:
        self._latency_s = latency_s
        self._begun: Counter[str] = Counter()

    async def run(self, episode: Episode) -> None:
        extra = episode.prompt.extra
        number = self._begun[extra["play"]]
        self._begun[extra["play"]] += 1
        for _ in range(extra["turns"][number % SAMPLES] - 1):
            await episode.generate()
            await asyncio.sleep(self._latency_s)
            episode.reply(Message("user", "Go on."))
        episode.finish((await episode.generate()).text)


class Unused:
    """A parser ends turns only where there is a tool."""

    schema: ClassVar[Schema] = {
        "type": "function",
        "function": {"name": "unused", "description": "", "parameters": {"type": "object", "properties": {}}},
    }

    async def __call__(self, arguments: dict[str, Any]) -> ToolResult:
        raise ToolUnavailable("no turn mentions a call")


class TurnsEndAtLetters:
    """The model seldom says the end token, and often a letter."""

    stop = tuple(string.ascii_lowercase)

    def mentions_call(self, text: str) -> bool:
        return False

    def parse(self, text: str) -> list[ToolCallRequest]:
        return []

    def render(self, calls: Sequence[ToolCall]) -> list[Message]:
        return [Message("user", "") for _ in calls]

    def ends_turn(self, text: str) -> bool:
        return True


def configuration(folder: Path, latency_s: float) -> Config:
    """A random model of the quickstart's shape; nothing is trained."""
    model = TinyModel(max_position_embeddings=ROOM, initializer_range=0.02)  # every token is about as likely
    write_task(Task(train_prompts=64, heldout_prompts=64, sft_conversations=640, model=model), folder)
    engine = f"{{dtype: float32, max_model_len: {ROOM}, max_num_seqs: {PLACES}, kv_cache_mb: 256, enforce_eager: true}}"
    settings = [
        f"rollout.engine={engine}",
        f"rollout.max_turns={MOST_TURNS}",
        "rollout.tool_parser=benchmarks.long_groups:TurnsEndAtLetters",
        f"rollout.max_response_tokens={ROOM - 64}",
        f'rollout.environment={{name: "benchmarks.long_groups:LongAnswers", arguments: {{latency_s: {latency_s}}}}}',
        "rollout.tools=[benchmarks.long_groups:Unused]",
        "data.tool_in_prompt=false",
        f'extensions.path=["{runs.ROOT}"]',
        "data.max_prompt_tokens=64",
    ]
    return read_config(find_target(folder / "model", None), settings, 0)[0]


def batch(config: Config, groups: int) -> list[Prompt]:
    """Prompts of one length, whose answers are not."""
    tokenizer, random = AutoTokenizer.from_pretrained(config.model.path), Random(0)
    messages = ({"role": "user", "content": "1+1"},)
    ids = tuple(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False))
    usual = [MEDIAN_TURNS * random.lognormvariate(0.0, SPREAD_PROMPTS) for _ in range(groups)]
    return [Prompt(str(n), "long", messages, "2", ids, {"usual": turns}) for n, turns in enumerate(usual)]


def of_round(prompt: Prompt, number: int, side: str) -> Prompt:
    """With the turns of its answers in this round, the same on both sides, and the id that the side needs."""
    random = Random(f"{number}/{prompt.id}")
    drawn = [prompt.extra["usual"] * random.lognormvariate(0.0, SPREAD_SAMPLES) for _ in range(SAMPLES)]
    turns = [min(MOST_TURNS, max(1, round(each))) for each in drawn]
    id_ = prompt.id if side == LONGEST else f"{prompt.id} of round {number}"
    return replace(prompt, id=id_, extra={"turns": turns, "play": f"{side}, {number}, {prompt.id}"})


def play(sampler: GroupSampler, prompts: list[Prompt], number: int, side: str) -> tuple[float, list[int]]:
    """Seconds of one batch, and the tokens of its answers."""
    prompts = [of_round(prompt, number, side) for prompt in prompts]
    began = time.perf_counter()
    tasks = [GroupTask(prompt, number, tuple(range(SAMPLES)), Sampling(1.0, 1.0, 0)) for prompt in prompts]

    async def sampled() -> list[list[Trajectory]]:
        return await asyncio.gather(*map(sampler.sample, tasks))

    groups = sampler.engines.loop.call(sampled())
    took = time.perf_counter() - began
    return took, [each.response_tokens for group in groups for each in group]


def measure(groups: int, rounds: int, latency_s: float) -> Figures:
    """Seconds and tokens of each side by round, and how long its answers are."""
    seconds: dict[str, list[float]] = {IN_ORDER: [], LONGEST: []}
    tokens: dict[str, list[int]] = {IN_ORDER: [], LONGEST: []}
    lengths: list[int] = []
    with tempfile.TemporaryDirectory() as name:
        config = configuration(Path(name) / "task", latency_s)
        prompts = batch(config, groups)
        check = partial(NodeComparison.of, config)
        with EventLoop() as loop, open_engines(config, Path(name) / "logs", loop, placement=None, check=check) as pool:
            sampler = GroupSampler(pool, config.rollout)
            pool.wait_ready()
            play(sampler, prompts, 0, LONGEST)  # what is known in the first round
            for number in range(1, rounds + 1):
                for side in list(seconds)[:: -1 if number % 2 else 1]:
                    took, found = play(sampler, prompts, number, side)
                    seconds[side].append(took)
                    tokens[side].append(sum(found))
                    lengths += found if side == LONGEST else []
                    print(f"round {number}, {side}: {took:.1f} s, {tokens[side][-1]} tokens", flush=True)
    about = {
        "latency_s": latency_s,
        "groups": groups,
        "rounds": rounds,
        "tokens": tokens,
        "lengths": summary(lengths),
        "environment": report.environment("cpu", 1),
    }
    return {"seconds": seconds} | about


def summary(lengths: Sequence[int]) -> dict[str, float]:
    """Of answers, in tokens. long: a tenth of them has as many, or more."""
    long = statistics.quantiles(lengths, n=10)[-1]
    return {"median": statistics.median(lengths), "long": long, "longest": max(lengths)}


def text(results: Sequence[Figures]) -> str:
    """The results of all latencies as Markdown."""
    about = report.describe(results[0]["environment"])
    return "\n\n".join(["# Long groups first", *map(_section, results), about])


def _section(result: Figures) -> str:
    seconds, lengths = result["seconds"], result["lengths"]
    ratios = [base / ours for base, ours in zip(seconds[IN_ORDER], seconds[LONGEST], strict=True)]
    rows = [(side, spread(took)) for side, took in seconds.items()]
    return "\n\n".join(
        [
            f"## Each turn is answered after {result['latency_s']:g} s",
            f"{result['groups']} prompts x {SAMPLES} samples of a random model of the quickstart's shape, one engine "
            f"that plays {PLACES} at once. Answers have {lengths['median']:.0f} tokens in the median, one in ten has "
            f"{lengths['long']:.0f} or more, the longest {lengths['longest']}. {result['rounds']} rounds in "
            "alternating order.",
            report.markdown(("", "seconds a batch: median (range)"), rows),
            f"In the order of the batch it takes {spread(ratios)} times as long.",
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.long_groups", description=__doc__)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--latency", type=float, nargs="+", default=[0.0, 0.1], metavar="S", help="of each answer")
    parser.add_argument("--out", type=Path, help="folder for long_groups.json and long_groups.md")
    options = parser.parse_args(argv)
    results = [measure(options.groups, options.rounds, latency_s) for latency_s in options.latency]
    print(text(results))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "long_groups.json").write_text(json.dumps(results, indent=1) + "\n")
        (options.out / "long_groups.md").write_text(text(results) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
