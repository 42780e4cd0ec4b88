"""Samples answers to prompts with its own engines, without a trainer, and stores them once they are scored."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ctpo_megatron.base.event_loop import EventLoop, end
from ctpo_megatron.base.run_paths import LogPaths
from ctpo_megatron.checks import NodeComparison
from ctpo_megatron.config import Config, EvalConfig, Extension, RewardConfig
from ctpo_megatron.data.records import Prompt
from ctpo_megatron.data.trajectory import Group, Trajectory
from ctpo_megatron.engines import GroupFailed, GroupTask, Sampling, open_engines
from ctpo_megatron.evaluate.samples import Sample
from ctpo_megatron.evaluate.store import SampleStore
from ctpo_megatron.rewards import REFERENCE, RewardPool
from ctpo_megatron.rollouts import GroupSampler
from ctpo_megatron.tracking import Display

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_STEP = 0
"""Step in every seed: an evaluation has the seeds of the evaluation before the first step of a run."""
TOGETHER = 8
"""Samples of a prompt that are sampled, scored and stored as one group; an async reward awaits them concurrently."""
_AT_ONCE = 256
"""Samples scored between two updates of the display."""


def answer(
    config: Config,
    prompts: Sequence[Prompt],
    store: SampleStore,
    tokenizer: PreTrainedTokenizerBase,
    logs: Path,
    display: Display,
) -> None:
    """Generate the samples missing in the store. Raises as `GroupSampler.sample` and `RewardPool.score`."""
    samples = config.eval.samples
    lacking = [prompt for prompt in prompts if not store.complete(prompt.id, samples)]
    total = sum(samples - sum(index < samples for index in store.played.get(prompt.id, ())) for prompt in lacking)
    if there := len(prompts) * samples - total:
        display.note(f"[evaluation] {there} of {there + total} samples are there already")
    if not lacking:
        return
    scores: list[float | None] = []

    def store_samples(group: Group) -> None:
        added = [Sample.of(group.prompt, each, _text(each, tokenizer)) for each in group.trajectories]
        store.add(added)
        scores.extend(sample.score for sample in added)
        judged = [score for score in scores if score is not None]
        display.progress(len(scores), total, {"score so far": statistics.fmean(judged)} if judged else {})

    display.stage("start")
    with ExitStack() as stack:
        # The engines load in the background while the scorers start.
        loop = stack.enter_context(EventLoop())
        check = partial(NodeComparison.of, config)
        engines = stack.enter_context(open_engines(config, logs, loop, placement=None, check=check))
        pool = stack.enter_context(RewardPool(config.reward, config.extensions.path, LogPaths(logs).rewards))
        engines.wait_ready()
        display.stage("evaluation")
        sampler = GroupSampler(engines, config.rollout)
        loop.call(play(config.eval, lacking, store.played, sampler, pool, store_samples))
        for prompt in sampler.quarantined:
            display.note(f"[evaluation] prompt {prompt.prompt_id} was discarded: {prompt.cause}")


async def play(
    settings: EvalConfig,
    prompts: Sequence[Prompt],
    played: Mapping[str, set[int]],
    sampler: GroupSampler,
    pool: RewardPool,
    finished: Callable[[Group], None],
) -> None:
    """Sample with running engines and score, `TOGETHER` samples of a prompt at a time, what is missing.

    played: indices of the samples that are there, by prompt id. finished: called with each scored group.
    """
    sampling = Sampling(settings.temperature, settings.top_p, 0)

    async def work(prompt: Prompt, indices: tuple[int, ...]) -> None:
        if sampler.is_quarantined(prompt):
            return
        try:
            trajectories = await sampler.sample(GroupTask(prompt, _STEP, indices, sampling))
        except GroupFailed as error:
            return sampler.lose(prompt, _STEP, error)
        group = Group(prompt, trajectories)
        await pool.score([group])
        finished(group)

    tasks = []
    for prompt in prompts:
        missing = sorted(set(range(settings.samples)) - played.get(prompt.id, set()))
        parts = [tuple(missing[start : start + TOGETHER]) for start in range(0, len(missing), TOGETHER)]
        tasks += [asyncio.create_task(work(prompt, part)) for part in parts]
    try:
        await asyncio.gather(*tasks)
    finally:
        await end(tasks)


def _text(trajectory: Trajectory, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the whole response, without special tokens."""
    response = trajectory.tokens["token_ids"][trajectory.tokens["turn"] > 0]
    return str(tokenizer.decode(response.tolist(), skip_special_tokens=True))


def reference_scores(
    settings: RewardConfig,
    search_path: Sequence[str] | None,
    prompts: Sequence[Prompt],
    samples: Sequence[Sample],
    display: Display,
) -> dict[tuple[str, int], float | None]:
    """Scores of the reference's scorer, of the whole responses, by prompt id and index; None without a verdict.

    settings: workers and deadlines; the reward functions in them are replaced. search_path: `extensions.path`.
    """
    by_id, scores = {prompt.id: prompt for prompt in prompts}, dict[tuple[str, int], float | None]()
    reward = settings.model_copy(update={"function": Extension(name=REFERENCE), "by_source": {}})
    display.stage("reference scorer")
    with RewardPool(reward, search_path) as pool:
        for start in range(0, len(samples), _AT_ONCE):
            groups = [_response(by_id[sample.prompt_id], sample) for sample in samples[start : start + _AT_ONCE]]
            asyncio.run(pool.score(groups))
            scores |= {(g.prompt.id, t.sample_index): g.rewards[0] for g in groups for t in g.trajectories}
            display.progress(len(scores), len(samples))
    return scores


def _response(prompt: Prompt, sample: Sample) -> Group:
    """A sample for the reference's scorer: the whole response instead of the final turn."""
    return Group(replace(prompt, token_ids=()), [Trajectory(prompt.id, sample.index, 0, final_text=sample.text)])
