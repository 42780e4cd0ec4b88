"""`ctpo eval`: samples missing answers, scores them, writes the results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctpo_megatron import __version__
from ctpo_megatron.base.files import write_json
from ctpo_megatron.base.run_paths import LOGS
from ctpo_megatron.config import Config, Extension
from ctpo_megatron.data.records import Prompt
from ctpo_megatron.evaluate.answering import answer, reference_scores
from ctpo_megatron.evaluate.results import REFERENCE_SCORER, RESULTS_FILE, ScoreColumn, results
from ctpo_megatron.evaluate.samples import unjudged
from ctpo_megatron.evaluate.store import SampleStore
from ctpo_megatron.evaluate.target import settings_of
from ctpo_megatron.tracking import Display

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STRICT = Extension(name="math_verify")


@dataclass(frozen=True)
class Outcome:
    """Results of `ctpo eval`. left_out: ids of prompts with missing samples, or without a verdict of a scorer.

    no_verdict: samples of the other prompts without a verdict. file: has the results as JSON.
    """

    results: dict[str, Any]
    left_out: list[str]
    no_verdict: int
    file: Path


def evaluate(
    config: Config,
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    output: Path,
    *,
    reference: bool,
    display: Display,
) -> Outcome:
    """Evaluate `config.model.path` on the prompts of `config.data.eval`, continuing from the samples in `output`.

    reference: also score with the reference's scorer. Raises ConfigError, and what sampling raises.
    """
    prompts = prompts[: config.eval.prompts]
    with SampleStore(output, settings_of(config, prompts)) as store:
        answer(config, prompts, store, tokenizer, output / LOGS, display)
        problems = {prompt.id: store.complete(prompt.id, config.eval.samples) for prompt in prompts}
    samples = [sample for problem in problems.values() for sample in problem]
    if not samples:
        raise RuntimeError(f"no prompt has all of its {config.eval.samples} samples; see {output / LOGS}")
    # `strict` is math_verify alone; a user's own functions are `reward`.
    scorer = "strict" if config.reward.function == STRICT and not config.reward.by_source else "reward"
    scorers = [ScoreColumn(scorer, {(s.prompt_id, s.index): s.score for s in samples})]
    if reference:
        scores = reference_scores(config.reward, config.extensions.path, prompts, samples, display)
        scorers.append(ScoreColumn(REFERENCE_SCORER, scores))
    for prompt_id, problem in problems.items():
        if not all(scorer.judges(problem) for scorer in scorers):
            problems[prompt_id] = []
    left_out = [prompt_id for prompt_id, problem in problems.items() if not problem]
    samples = [sample for problem in problems.values() for sample in problem]
    if not samples:
        raise RuntimeError(
            "no prompt has a sample with a verdict: the lines above say why; the same command tries again"
        )
    found = _facts(config, scorers, left_out) | results(samples, scorers, config.run.seed)
    write_json(output / RESULTS_FILE, found)
    return Outcome(found, left_out, unjudged(samples), output / RESULTS_FILE)


def _facts(config: Config, scorers: Sequence[ScoreColumn], left_out: list[str]) -> dict[str, Any]:
    evaluation, rollout = config.eval, config.rollout
    return {
        "model": config.model.path,
        "data": list(config.data.eval),
        "samples_per_prompt": evaluation.samples,
        "temperature": evaluation.temperature,
        "top_p": evaluation.top_p,
        "seed": config.run.seed,
        "max_turns": rollout.max_turns,
        "max_response_tokens": rollout.max_response_tokens,
        "tool_parser": rollout.tool_parser.name,
        "reward": config.reward.function.name,
        "scorers": [scorer.name for scorer in scorers],
        "left_out": left_out,
        "version": __version__,
    }
