"""What rank zero's Python costs in a step, stage by stage: `python -m benchmarks.driver [--prompts 32 128 512]`.

A step is prompts x 8 samples x about 3,400 tokens, in turns with tool calls. Engines are not measured: trajectories are
made up, pickled as an engine's answer is, with buffers out of band, and read back as Ray does. Each size runs in a
process of its own. CPU seconds of the calling thread and its process; the stages in `SERIAL` delay the step.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import io
import json
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.dump import byte_tokenizer, decoding_s
from benchmarks.kernels import report
from ctpo_megatron.config import AdvantageConfig, Extension, PolicyConfig, RewardConfig, RolloutConfig
from ctpo_megatron.data.packing import split_evenly
from ctpo_megatron.data.records import Prompt, ToolCall
from ctpo_megatron.data.trajectory import Group, Trajectory
from ctpo_megatron.data.trajectory_file import encode_ahead, read_ahead
from ctpo_megatron.models import FAMILIES, ModelSpec
from ctpo_megatron.objective import batch_advantages
from ctpo_megatron.policy.minibatch import checked_sequences, make_mini_batches, packing_rules, share_of
from ctpo_megatron.policy.parallel import Layout
from ctpo_megatron.rewards import RewardPool, Scorer, ScoreReport
from ctpo_megatron.rollouts.filters import Filters
from ctpo_megatron.rollouts.metrics import staleness_metrics
from ctpo_megatron.rollouts.rollouts import Draw, OpenBatch
from ctpo_megatron.tracking import write_trajectories

SAMPLES, MEAN_TOKENS, MINI_BATCH, REPLICAS = 8, 3_300, 32, 8
FIRST_ID, LAST_ID = 257, 7_000
"""Token ids: of `byte_tokenizer`, without single bytes."""
SPEC = ModelSpec(FAMILIES["Qwen3ForCausalLM"], 36, 2560, 32, 8, 128, 9728, 40960, 151_936)
"""The shape of Qwen3-4B, by which shares are balanced."""
ASSEMBLE, SEQUENCES, PACK, SHARES = "metrics, assemble", "sequences", "mini-batches", "shares of other ranks"
SERIAL = (ASSEMBLE, SEQUENCES, PACK, SHARES)
"""Between the last group and the first pass."""
RECEIVE, SCORE, STATE, ENCODE, DUMP, DECODING = (
    "receive",
    "score",
    "save: on the ranks' path",
    "save: in its thread",
    "dump",
    "decoding of it",
)
READ = "read what was ahead"
GOALS = {"serial": 0.15, RECEIVE: 0.01, "save": 0.15, "dump beyond decoding": 0.3, "bytes a token": 20.0}
"""CPU seconds per million tokens, and bytes."""


@dataclass
class Stages:
    """CPU seconds by stage."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        gc.collect()
        began = time.process_time()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.process_time() - began


def made_up(rng: np.random.Generator, number: int) -> tuple[Prompt, list[Trajectory]]:
    """A prompt and its samples, half of which are right; one to four turns."""

    def ids(count: int) -> Any:
        return rng.integers(FIRST_ID, LAST_ID, count)

    prompt = Prompt(f"p{number}", "math", ({"role": "user", "content": "q"},), str(number), tuple(ids(150).tolist()))
    group = []
    for sample in range(SAMPLES):
        made = Trajectory(prompt.id, sample, seed=sample, finish_reason="answer")
        made.append_context(prompt.token_ids, 0)
        turns = int(rng.integers(1, 5))
        each = max(4, (int(rng.gamma(4.0, MEAN_TOKENS / 4.0)) + 16) // turns)
        for turn in range(1, turns + 1):
            made.append_model(ids(each), -rng.exponential(0.4, each), np.full(each, 3 + (turn > 2)), turn)
            if turn < turns:
                made.append_context(ids(40), turn)
                made.tool_calls.append(
                    ToolCall(turn, "code_interpreter", {"code": "print(1)"}, "success", "1\n", 0.2, 0.1)
                )
        made.final_text = f"hence \\boxed{{{number + int(rng.random() < 0.5)}}}"
        group.append(made)
    return prompt, group


def pickled(group: list[Trajectory]) -> tuple[bytes, list[bytes]]:
    """An engine's answer as it travels: what Ray pickles, and the buffers that it leaves in its object store."""
    buffers: list[pickle.PickleBuffer] = []
    sink = io.BytesIO()
    pickle.Pickler(sink, protocol=5, buffer_callback=buffers.append).dump(group)
    return sink.getvalue(), [bytes(buffer.raw()) for buffer in buffers]


def memory_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def measure(count: int) -> dict[str, Any]:
    """Figures of one step of `count` prompts."""
    rng = np.random.default_rng(0)
    answers, prompts = [], []
    before = memory_bytes()
    for number in range(count):
        prompt, made = made_up(rng, number)
        answers.append(pickled(made))
        prompts.append(prompt)
    del made
    stage = Stages()
    with stage(RECEIVE):
        sampled = [pickle.loads(answer, buffers=buffers) for answer, buffers in answers]
        groups = [Group(prompt, trajectories) for prompt, trajectories in zip(prompts, sampled, strict=True)]
    del answers, sampled
    gc.collect()
    held = memory_bytes() - before
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    tokens = sum(map(len, trajectories))

    extension = Extension(name="void_turn")
    config = RolloutConfig(prompts_per_step=count, samples_per_prompt=SAMPLES, filters=[extension])
    with RewardPool(RewardConfig(workers=2)) as pool:
        scorer = Scorer(pool)
        with stage(SCORE):
            reports = asyncio.run(all_scored(scorer, groups))
        opened = OpenBatch(5, config, MINI_BATCH)
        opened.draws += map(Draw, prompts)
        for draw, group, scored in zip(opened.draws, groups, reports, strict=True):
            opened.add(draw, group, scored)
        save(opened, config, prompts, stage)
    with stage(ASSEMBLE):
        batch = opened.assemble(scorer, Filters(config.filters))
        staleness_metrics(batch.trained, 4)
    distribute(batch.trajectories, [group.rewards for group in batch.trained], stage)
    dump(groups, stage)
    return {
        "prompts": count,
        "tokens": tokens,
        "bytes a token": held / tokens,
        "seconds": {name: seconds * 1e6 / tokens for name, seconds in stage.seconds.items()},
    }


async def all_scored(scorer: Scorer, groups: Sequence[Group]) -> list[ScoreReport]:
    return await asyncio.gather(*(scorer.score([group]) for group in groups))


def save(opened: OpenBatch, config: RolloutConfig, prompts: Sequence[Prompt], stage: Stages) -> None:
    """What a checkpoint keeps of a batch ahead, and the way back."""
    with stage(STATE):
        ahead = {"batches": [opened.state_dict()]}
    with tempfile.TemporaryDirectory() as folder:
        with stage(ENCODE):
            (Path(folder) / "ahead.parquet").write_bytes(encode_ahead(ahead))
        with stage(READ):
            found = read_ahead(Path(folder))
            again = OpenBatch(5, config, MINI_BATCH)
            again.load_state_dict((found or {})["batches"][0], {p.id: p for p in prompts})
    assert [group.trajectories for group in again.complete] == [group.trajectories for group in opened.complete]


def distribute(trajectories: list[Trajectory], rewards: list[list[float | None]], stage: Stages) -> None:
    """Mini-batches of rank zero, and the tokens that it would send to the other ranks."""
    one = {f"{of}_{what}": int(what == "size") for of in ("tp", "pp", "cp", "ep") for what in ("rank", "size")}
    device = torch.device("cpu")
    layout = Layout(rank=0, world_size=1, dp_rank=0, dp_size=REPLICAS, device=device, **one)
    with stage(SEQUENCES):
        advantages = batch_advantages(rewards, AdvantageConfig())
        sequences = checked_sequences(trajectories, advantages, SPEC.vocab_size, 4)
    size = MINI_BATCH * SAMPLES
    with stage(PACK):
        make_mini_batches(
            sequences,
            advantages,
            size=size,
            rules=packing_rules(PolicyConfig(micro_batch_tokens=40_960)),
            layout=layout,
            flops=SPEC.forward_flops,
            whole_attention=True,
            skip_zero_advantage=True,
        )
    with stage(SHARES):
        for start in range(0, len(sequences), size):
            chunk = sequences[start : start + size]
            shares = split_evenly(chunk, REPLICAS)
            for share in shares:
                share_of([chunk[index] for index in share])


def dump(groups: list[Group], stage: Stages) -> None:
    """All trajectories with their text, and the tokenizer's part of it."""
    tokenizer = byte_tokenizer()
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    with tempfile.TemporaryDirectory() as folder, stage(DUMP):
        write_trajectories(Path(folder), 1, groups, decode)
    stage.seconds[DECODING] = decoding_s(groups, tokenizer)


def figures(found: dict[str, Any]) -> dict[str, float]:
    """What the goals are of."""
    seconds = found["seconds"]
    return {
        "serial": sum(seconds[name] for name in SERIAL),
        RECEIVE: seconds[RECEIVE],
        "save": seconds[STATE] + seconds[ENCODE],
        "dump beyond decoding": seconds[DUMP] - seconds[DECODING],
        "bytes a token": found["bytes a token"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--alone", type=int, help="measure this size here and print it as JSON")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    if options.alone:
        measure(2)  # imports, and the first calls of libraries
        print(json.dumps(measure(options.alone)))
        return
    found = []
    for count in options.prompts:
        command = [sys.executable, "-m", "benchmarks.driver", "--alone", str(count)]
        printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        found.append(json.loads(printed.splitlines()[-1]))
        print(f"{count} prompts, {found[-1]['tokens']:,} tokens: {figures(found[-1])}", flush=True)
    about = report.environment("cpu")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "driver.json").write_text(json.dumps({"environment": about, "rows": found}, indent=1) + "\n")
    sizes = [f"{each['prompts']} prompts ({each['tokens'] / 1e6:.1f} M tokens)" for each in found]
    stages = [(name, *(f"{each['seconds'][name]:.4f}" for each in found)) for name in found[0]["seconds"]]
    goals = [(name, *(f"{figures(each)[name]:.3f}" for each in found), f"{GOALS[name]:g}") for name in GOALS]
    text = "\n\n".join(
        (
            "# Rank zero in a step",
            "CPU seconds per million tokens of trajectories. Serial is the sum of "
            f"{', '.join(SERIAL)}: it delays the step. A save is the first of its process: it pays for fresh memory.",
            report.markdown(("stage", *sizes), stages),
            report.markdown(("figure", *sizes, "goal"), goals),
            report.describe(about),
        )
    )
    (options.out / "driver.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
