"""Samples answers to prompts with its own engines, without a trainer, and stores every sample once it is scored."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ctpo_megatron.base.event_loop import EventLoop, end
from ctpo_megatron.base.run_paths import LogPaths
from ctpo_megatron.config import Config, Extension, RewardConfig
from ctpo_megatron.data.batch import Group
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.data.trajectory import Trajectory
from ctpo_megatron.engines import GroupFailed, GroupTask, Sampling, open_engines
from ctpo_megatron.evaluate.samples import Sample
from ctpo_megatron.evaluate.store import SampleStore
from ctpo_megatron.preflight import NodeComparison
from ctpo_megatron.rewards import REFERENCE, RewardPool
from ctpo_megatron.rollouts import GroupSampler
from ctpo_megatron.tracking import Display

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_STEP = 0
"""Step in every seed: an evaluation has the seeds of the evaluation before the first step of a run."""
GATHER_S = 0.2
"""How long finished samples wait for others that are scored with them."""
_AT_ONCE = 256
"""Samples scored between two updates of the display."""


class ScoredAnswers:
    """Scores samples while others are sampled, and adds them to a store.

    decode: token ids to text without special tokens. finished: called with the samples that were added.
    """

    def __init__(
        self,
        pool: RewardPool,
        store: SampleStore,
        decode: Callable[[Sequence[int]], str],
        finished: Callable[[Sequence[Sample]], None],
    ) -> None:
        self._pool, self._store, self._decode, self._finished = pool, store, decode, finished
        self._taken: list[Group] = []
        self._scoring: set[asyncio.Task[None]] = set()

    def take(self, prompt: Prompt, trajectory: Trajectory) -> None:
        """Take a sample of a prompt, which is scored in the background. Raises what scoring has raised.

        Samples that come soon after are scored together, as an async reward awaits them concurrently.
        """
        for task in [each for each in self._scoring if each.done()]:
            self._scoring.discard(task)
            task.result()
        if not self._taken:
            self._scoring.add(asyncio.create_task(self._keep()))
        self._taken.append(Group(prompt, [trajectory]))

    async def kept(self) -> None:
        """Return when all samples are in the store."""
        await asyncio.gather(*self._scoring)

    async def _keep(self) -> None:
        await asyncio.sleep(GATHER_S)
        groups, self._taken = self._taken, []
        await self._pool.score(groups)
        samples = [Sample.of(group.prompt, t, self._text(t)) for group in groups for t in group.trajectories]
        self._store.add(samples)
        self._finished(samples)

    def _text(self, trajectory: Trajectory) -> str:
        return self._decode(trajectory.tokens["token_ids"][trajectory.tokens["turn"] > 0].tolist())


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

    def finished(added: Sequence[Sample]) -> None:
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
        answers = ScoredAnswers(pool, store, _decoder(tokenizer), finished)
        loop.call(play(config, lacking, store, sampler, answers))
        for prompt in sampler.quarantine.records:
            display.note(f"[evaluation] prompt {prompt.prompt_id} was discarded: {prompt.cause}")


async def play(
    config: Config, prompts: Sequence[Prompt], store: SampleStore, sampler: GroupSampler, answers: ScoredAnswers
) -> None:
    """Sample with running engines as section `eval` specifies, and score and store the answers, one by one."""
    settings = config.eval
    sampling = Sampling(settings.temperature, settings.top_p, 0)
    indices = {prompt.id: set(range(settings.samples)) - {*store.played.get(prompt.id, ())} for prompt in prompts}
    lacking = ((prompt, index) for prompt in prompts for index in sorted(indices[prompt.id]))

    async def work() -> None:
        for prompt, index in lacking:
            if prompt in sampler.quarantine:
                continue
            try:
                (trajectory,) = await sampler.sample(GroupTask(prompt, _STEP, (index,), sampling))
            except GroupFailed as error:
                sampler.lose(prompt, _STEP, error)
            else:
                answers.take(prompt, trajectory)

    places = len(sampler.engines.engines) * (config.rollout.engine.max_num_seqs + 1)
    tasks = [asyncio.create_task(work()) for _ in range(places)]
    try:
        await asyncio.gather(*tasks)
    finally:
        await end(tasks)
    await answers.kept()


def _decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    return lambda token_ids: str(tokenizer.decode(token_ids, skip_special_tokens=True))


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
