"""An evaluation against the same sampling inside a training step: 256 prompts x 8, in turns, by the same engine.

    PYTHONPATH=.:kernels:sandbox:launchers python -m benchmarks.evaluation [--run RUN] [--rounds 5] [--out DIR]

An evaluation in training calls `rollouts.evaluation.answer`: groups are sampled, then scored. `ctpo eval` samples the
same tokens (same prompts, seeds and temperature; that is checked), scores and stores each sample as it finishes, and
computes its figures with their intervals. Start of the engine and the page are in neither. --run: a finished quickstart
run; without it the model is random, and answers until its tokens are used up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.kernels import report
from ctpo_megatron.config import Config, PrepareConfig
from ctpo_megatron.data import Group, Prompt, prepare
from ctpo_megatron.engines import EnginePool, Sampling
from ctpo_megatron.engines.open import open_engines
from ctpo_megatron.environments.prompts import held_out_prompts
from ctpo_megatron.evaluate import find_target, read_config
from ctpo_megatron.evaluate.answering import ScoredAnswers, play
from ctpo_megatron.evaluate.results import ScoreColumn, results
from ctpo_megatron.evaluate.store import SampleStore
from ctpo_megatron.rewards import RewardPool
from ctpo_megatron.rollouts import Request, Scheduler, Scorer
from ctpo_megatron.rollouts.evaluation import answer
from ctpo_megatron.tracking import Phases

GOAL = 1.1
QUICKSTART = [
    "data.max_prompt_tokens=64",
    "data.tool_in_prompt=false",
    "rollout.max_turns=4",
    "rollout.max_turn_tokens=64",
    "rollout.max_response_tokens=176",
    "rollout.engine={dtype: float32, max_model_len: 256, max_num_seqs: 256, kv_cache_mb: 64, enforce_eager: true}",
    "sandbox={slots: 2, run_timeout_s: 2.0, memory_mb: 512}",
]


def configuration(run: Path | None, folder: Path, prompts: int, samples: int) -> Config:
    """Of an evaluation of the run's export, or of a random model; at the temperature of training."""
    settings = [f"eval.samples={samples}", "eval.temperature=1.0"]
    if run is not None:
        return read_config(find_target(run, None), [*settings, f'data.eval=["{run}/task/heldout.parquet"]'], 0)[0]
    sizes = {"train_prompts": 64, "heldout_prompts": prompts, "sft_conversations": 640}
    prepare(PrepareConfig(directory=str(folder / "task"), **sizes))
    data = f'data.eval=["{folder}/task/heldout.parquet"]'
    return read_config(find_target(folder / "task" / "model", None), [*QUICKSTART, *settings, data], 0)[0]


def train_side(config: Config, prompts: Sequence[Prompt], fleet: EnginePool, pool: RewardPool) -> list[Group]:
    """What a training step does to get its batch."""
    request = Request(0, config.eval.samples, Sampling(1.0, 1.0, 0))
    return answer(Scheduler.of(fleet), Scorer(pool), prompts, request, threading.Event(), Phases())


def eval_side(
    config: Config, prompts: Sequence[Prompt], fleet: EnginePool, pool: RewardPool, folder: Path, tokenizer: Any
) -> dict[tuple[str, int], tuple[float, int]]:
    """What `ctpo eval` does with engines that are up; score and length of every sample."""
    with SampleStore(folder, {}) as store:
        answers = ScoredAnswers(
            pool, store, lambda ids: tokenizer.decode(ids, skip_special_tokens=True), lambda _: None
        )
        play(config.eval, prompts, store, Scheduler.of(fleet), answers)
        samples = [sample for prompt in prompts for sample in store.complete(prompt.id, config.eval.samples)]
    results(samples, [ScoreColumn("strict", {(s.prompt_id, s.index): s.score for s in samples})], seed=0)
    return {(s.prompt_id, s.index): (s.score, s.response_tokens) for s in samples}


def measure(run: Path | None, prompts: int, samples: int, rounds: int) -> dict[str, Any]:
    """Seconds of each side and round. Raises RuntimeError when the sides do not sample the same."""
    seconds: dict[str, list[float]] = {"training step": [], "evaluation": []}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        config = configuration(run, folder, prompts, samples)
        tokenizer = AutoTokenizer.from_pretrained(config.model.path)
        chosen = held_out_prompts(config, tokenizer).prompts[:prompts]
        fleet = stack.enter_context(open_engines(config, folder / "logs", placement=None))
        pool = stack.enter_context(RewardPool(config.reward))
        fleet.wait_ready()
        tokens = 0
        for number in range(rounds + 1):
            found: dict[str, Any] = {}
            for side in sorted(seconds, reverse=bool(number % 2)):
                began = time.perf_counter()
                if side == "evaluation":
                    found[side] = eval_side(config, chosen, fleet, pool, folder / str(number), tokenizer)
                else:
                    groups = train_side(config, chosen, fleet, pool)
                took = time.perf_counter() - began
                if number:  # the first round fills the prefix cache
                    seconds[side].append(took)
            sampled = [trajectory for group in groups for trajectory in group.trajectories]
            trained = {(t.prompt_id, t.sample_index): (t.reward, t.response_tokens) for t in sampled}
            if trained != found["evaluation"]:
                raise RuntimeError("the two sides sampled different trajectories")
            tokens = sum(t.response_tokens for t in sampled)
    settings = {"prompts": len(chosen), "samples": samples, "rounds": rounds, "response_tokens": tokens}
    return {"seconds": seconds, "trained": run is not None, **settings, "environment": report.environment("cpu", 1)}


def text(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    seconds: dict[str, list[float]] = result["seconds"]
    ratios = [ours / base for ours, base in zip(seconds["evaluation"], seconds["training step"], strict=True)]
    ratio = statistics.median(ratios)
    rows = []
    for side, took in seconds.items():
        rows.append((side, f"{statistics.median(took):.2f}", f"{min(took):.2f} to {max(took):.2f}"))
    model = "a finished quickstart's model" if result["trained"] else "a random model of the quickstart's shape"
    met = "met" if ratio <= GOAL else "missed"
    return "\n\n".join(
        [
            "# An evaluation against the same sampling inside a training step",
            f"{result['prompts']} prompts x {result['samples']} samples of {model}, {result['response_tokens']:,} "
            f"tokens of response; one engine of one thread, sandbox and scorer beside it on the other core; "
            f"{result['rounds']} rounds in alternating order after one that is not counted.",
            report.markdown(["side", "seconds, median", "range"], rows),
            f"Goal: at most {GOAL} times the training step's: {met} (median of the rounds' ratios {ratio:.3f}, "
            f"{min(ratios):.3f} to {max(ratios):.3f}).",
            report.describe(result["environment"]),
        ]
    )


def main(argv: list[str] | None = None) -> int:
    """The command line; exit status 0 also when the goal is missed: the text says it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evaluation", description=__doc__)
    parser.add_argument("--run", type=Path, help="finished quickstart run; default: a random model")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="folder for evaluation.json and evaluation.md")
    options = parser.parse_args(argv)
    result = measure(options.run, options.prompts, options.samples, options.rounds)
    print(text(result))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n")
        (options.out / "evaluation.md").write_text(text(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
