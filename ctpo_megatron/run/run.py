"""A run on rank zero: what it starts, its steps, what is due after each, and when it ends early."""

from __future__ import annotations

import logging
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.base.stop import BEGUN, Cancelled, StopRequest, StopSignal
from ctpo_megatron.checks import DataValidation, NodeComparison
from ctpo_megatron.config import (
    Config,
    DataConfig,
    Job,
    Placement,
    RolloutConfig,
    evaluates,
    needs_engines,
    node_ranks,
    shares_gpus,
    world_size,
)
from ctpo_megatron.data import Batch, Curriculum, MixedFile, PromptMix, PromptSampler, PromptSet, PromptStream
from ctpo_megatron.environments import usable, write_record
from ctpo_megatron.policy import TrainResult, capabilities
from ctpo_megatron.rewards import OverlongPenalty, RewardPool, Scorer
from ctpo_megatron.rollouts import Evaluated, Evaluation, EventLoop, GroupSampler, Replay, Rollouts
from ctpo_megatron.run.checkpoints import Checkpoints
from ctpo_megatron.run.ranks import TrainerGroup
from ctpo_megatron.run.reporter import Reporter
from ctpo_megatron.tracking import Phases, recorded_trajectories, trajectory_files

if TYPE_CHECKING:
    from ctpo_megatron.engines import EnginePool, RayRuntime

log = logging.getLogger(__name__)

_VERDICT_STEPS = 3
"""Steps that `reward.max_failed` is a mean over: a judge may be away for one."""


@dataclass(frozen=True)
class Services:
    """What rank zero owns besides its share of the trainer."""

    rollouts: Rollouts
    evaluation: Evaluation
    pool: EnginePool | None = None
    """The engines; None for a recording without evaluations."""
    record_data: Callable[[], None] = lambda: None
    """Writes `data.json`; for when nothing refuses a resume any more."""


@contextmanager
def start_services(
    config: Config, directory: Path, phases: Phases, stop: StopRequest, ray: RayRuntime | None = None
) -> Iterator[Services]:
    """Start sandbox, engines and scorers, and read the prompts; the engines load in the background.

    ray: begun by `begin_ray`; None: it starts with the engines. stop: checked while engines start and groups are
    sampled. Raises DataError for bad prompts, TokenizerError for a chat template that cannot be used, and ConfigError
    for a tokenizer of more tokens than the model has.
    """
    validation = DataValidation.of(config, directory)
    validation.check_vocabulary()
    logs = RunPaths(directory).logs
    with ExitStack() as stack:
        pool, loop = None, stack.enter_context(EventLoop())
        if needs_engines(config):  # first: engines load while prompts are read and scorers start
            from ctpo_megatron.engines import open_engines  # only here: a replay alone needs no Ray

            placement = Placement.of(config, Job(world_size(), node_ranks())) if capabilities().cuda else None
            check = partial(NodeComparison.of, config)
            opened = open_engines(config, logs.root, loop, placement=placement, check=check, stop=stop, ray=ray)
            pool = stack.enter_context(opened)
        train = validation.training()
        usable(train)
        held_out = usable(validation.held_out(train)) if evaluates(config) else []
        prompts = _stream(train, config.data, config.run.seed)
        sampler = answering = GroupSampler(_source(config.rollout, pool), config.rollout)
        if config.rollout.replay is not None and pool is not None:  # a recording has no answers of these weights
            answering = GroupSampler(pool, config.rollout)
        scorers = stack.enter_context(RewardPool(config.reward, config.extensions.path, logs.rewards))
        penalty = None
        if (overlong := config.reward.overlong_penalty) is not None:
            penalty = OverlongPenalty(overlong.buffer, overlong.penalty, config.rollout.max_response_tokens)
        scoring = Scorer(scorers, penalty, by_turn=config.objective.by_turn)
        rollouts = Rollouts(
            *(config.rollout, loop, sampler, scoring, prompts, stop, phases),
            steps=config.run.steps,
            mini_batch_prompts=config.policy.mini_batch_prompts,
            by_turn=config.objective.by_turn,
        )
        evaluation = Evaluation(config.eval, loop, answering, Scorer(scorers), held_out, stop, phases)
        record = partial(write_record, train, directory)
        yield Services(stack.enter_context(rollouts), stack.enter_context(evaluation), pool, record)


def _stream(train: PromptSet, data: DataConfig, seed: int) -> PromptStream:
    if data.sampler is not None:
        return Curriculum(data.sampler, train.prompts, seed, rerendered=data.rerender)
    if (weights := data.train_weights) is None:
        return PromptSampler(train.prompts, seed, data.shuffle, rerendered=data.rerender)
    parts = zip(data.train_files, weights, train.mix(data.train_files), strict=True)
    return PromptMix([MixedFile(*part) for part in parts], seed, data.shuffle, rerendered=data.rerender)


def _source(rollout: RolloutConfig, pool: EnginePool | None) -> EnginePool | Replay:
    """Return what gives the trajectories to train on. pool: of the run's engines."""
    if rollout.replay is None:
        assert pool is not None  # a run without a recording starts engines
        return pool
    recorded = trajectory_files(Path(rollout.replay))
    return Replay(lambda step: recorded_trajectories(recorded[step]), rollout, pool)


class Run:
    """A run on rank zero, which decides for all ranks: samples, publishes, logs, evaluates and saves when due.

    Where engines and trainer share GPUs they take turns: the trainer leaves before engines wake to sample, and engines
    sleep when it computes (`TrainerGroup.share_gpus`). done: RL steps finished. resumed: RL continues from a
    checkpoint.
    """

    def __init__(
        self,
        config: Config,
        trainer: TrainerGroup,
        services: Services,
        checkpoints: Checkpoints,
        report: Reporter,
        stop: StopSignal,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """clock: seconds, for `checkpoint.every: auto`.

        Engines that share GPUs sleep from now on: vLLM measures a GPU when it starts, so the trainer must take memory
        afterwards.
        """
        self.config, self._trainer, self._checkpoints = config, trainer, checkpoints
        self._report, self._stop = report, stop
        self._rollouts, self._evaluation, self._pool = services.rollouts, services.evaluation, services.pool
        self._ahead = config.rollout.ahead > 0
        # Not before the thread of the rollouts has begun, which would do the same.
        self._yields = self._ahead and not capabilities().cuda
        self._verdicts = _Verdicts(config.reward.max_failed)
        self._clock, self._saved_at = clock, clock()
        self._connected = self.resumed = False
        self.done = 0
        self._shared = services.pool if shares_gpus(config) else None
        if self._shared is not None:
            self._shared.sleep(level=2)
            trainer.share_gpus(self._shared)

    @property
    def stopped(self) -> bool:
        """Whether the run is to stop: its state is saved, and no step follows."""
        return self._stop.is_set()

    def check_start(self) -> None:
        """Raises EngineError as soon as it is known that the engines, which load in the background, do not start."""
        if self._pool is not None:  # a recording has none
            self._pool.check_start()

    def restore(self, checkpoint: Path | None) -> None:
        """Continue from a checkpoint, or begin."""
        done = self._checkpoints.restore(checkpoint)
        self.resumed = done is not None
        self.done = done or 0

    def begin(self) -> None:
        """Log, evaluate and save the state before the first step."""
        if not self.resumed or (self.evaluates and self._evaluation.lacks(self._report.latest)):
            self._report.log(self.done, {})
            self._evaluate()  # also in a run that is to stop: it reports what is missing
        if not self.resumed and self.saves:
            self._save()

    def steps(self) -> Iterator[int]:
        """Numbers of the steps still to do; ends early when the run is to stop."""
        while self.done < self.config.run.steps and not self.stopped:
            step = self.done + 1
            with self._report.progress.within("step"), ExitStack() as traced:
                if step in self.config.run.profile_steps:
                    traced.enter_context(self._traced(step))
                yield step

    @contextmanager
    def _traced(self, step: int) -> Iterator[None]:
        """Within, engines and trainer record what they do; then they write it."""
        if self._pool is not None:
            self._pool.begin_trace(step)
        self._trainer.begin_trace(step)
        yield
        with self._report.phase("profile"):
            self._trainer.end_trace(step, self.config.run.directory)
            if self._pool is not None:
                self._pool.end_trace()

    def publish(self) -> None:
        """Have the engines sample with the trainer's weights, and free its device memory.

        Waits for an evaluation of the former weights. Returns at once when the run is to stop.
        """
        self._end_evaluation()
        version = self._trainer.version
        try:
            self._connect()
            with self._report.phase("publish"):
                if not self._rollouts.publish(self._trainer, version):
                    return
                self._wake_engines()
        except Cancelled as cancelled:
            log.info("weights %d: %s", version, cancelled)
            return
        self._trainer.release()

    def _connect(self) -> None:
        """Wait until the engines are up, and open the way for their weights."""
        if self._connected:
            return
        with self._report.phase("engine_start"):
            self._report.note("waiting for the engines to load")
            if self._pool is not None:
                facts = self._pool.wait_ready()
                chosen = self._pool.settings.weights.transport
                log.info("weights go to the engines by %s (rollout.weights.transport: %s)", facts.transport, chosen)
                sampler, ours = str(facts.dtype).removeprefix("torch."), self.config.policy.dtype
                if sampler != ours:  # whatever was configured
                    sides = f"the engines compute in {sampler} (rollout.engine.dtype), the trainer in {ours}"
                    log.warning("warning: %s (policy.dtype): their log-probs will differ by rounding", sides)
                self._trainer.connect(facts, pool=self._pool)
        self._connected = True

    def _wake_engines(self) -> None:
        """Before engines sample on shared GPUs: every rank leaves them, then the engines wake. Raises Cancelled."""
        if self._shared is not None and self._shared.is_asleep:
            self._trainer.release()
            self._shared.wake()

    def next_batch(self, step: int) -> Batch | None:
        """Return the batch of a step; None when the run is to stop."""
        try:
            self._wake_engines()
        except Cancelled as cancelled:
            log.info("step %d: %s", step, cancelled)
            return None
        if self._yields:
            from ctpo_megatron.engines import yield_to_engines  # of CPUs alone

            self._yields = False
            yield_to_engines()
        # A batch that is sampled when it is requested times its own phases.
        with self._report.phase("wait_rollout") if self._ahead else nullcontext():
            batch = self._rollouts.next_batch(step)
        if batch is not None and self._shared is not None:
            self._shared.sleep(level=2)  # these weights are not sampled again, so the engines may drop them
        return batch

    def finish_step(self, step: int, batch: Batch, result: TrainResult) -> None:
        """Log a step whose updates are done; evaluate and save when due.

        Raises TooManyFailed, once the state is saved, when `reward.max_failed` is exceeded.
        """
        self.done = step
        # Before the line of this step begins: its result belongs to the line of an earlier one.
        self._end_evaluation()
        self._report.log_step(step, batch, result)
        problem = self._verdicts.problem(step, batch)
        if self.stopped:
            return
        if problem:
            self._checkpoints.ensure_saved(step)
            raise TooManyFailed(problem)
        self._evaluate()
        if self.stopped:
            return
        if self.saves:
            self._save()
        self._checkpoints.complete(step, wait=False)

    def end(self) -> bool:
        """Finish what is under way, and save if the run is to stop; returns whether all steps were done."""
        try:
            if not self._trainer.stop_agreed():
                self._end_evaluation()
                if self._pool is not None:
                    # Engines may still take the last weights; what becomes of them is raised.
                    self._pool.finish_update()
        except Cancelled as cancelled:
            log.info("%s", cancelled)
        if self._trainer.stop_agreed():
            self._end_evaluation()
            self._checkpoints.ensure_saved(self.done)
            return False
        self._checkpoints.complete(self.done, wait=True)
        return True

    def _save(self) -> None:
        self._saved_at = self._clock()
        self._checkpoints.save(self.done)

    @contextmanager
    def progress_noted(self) -> Iterator[None]:
        """Within, a failure of a run that has trained, now or before a resume, gets a note that says so (`BEGUN`)."""
        try:
            yield
        except Exception as error:
            if self.done:
                error.add_note(f"{BEGUN} {self.done}")
            raise

    def _evaluate(self) -> None:
        """Answer the held-out prompts with the weights published last, when due, for the line of the steps done.

        Where engines sample ahead training continues meanwhile, unless something needs the result: `publish` waits for
        it, as all answers are to be of one version.
        """
        if not self.evaluates:
            return
        if self._ahead and not self.awaits_evaluation:
            self._evaluation.begin(self.done)
            return
        try:
            self._wake_engines()
            evaluated = self._evaluation.run(self.done)
        except Cancelled as cancelled:
            evaluated = Evaluated(self.done, missing=str(cancelled))
        self._report.log(*self._kept(evaluated))

    def _end_evaluation(self) -> None:
        """Wait for an evaluation that is under way, and add it to the line of its step, the latest."""
        if (evaluated := self._evaluation.end()) is not None:
            self._report.log_evaluation(*self._kept(evaluated))

    def _kept(self, evaluated: Evaluated) -> tuple[int, dict[str, float]]:
        """Dump the answers of an evaluation; returns its step and metrics."""
        if evaluated.missing:
            self._report.note(f"[eval] step {evaluated.step}: MISSING, stop requested meanwhile ({evaluated.missing})")
        if evaluated.groups:
            self._report.dump_evaluation(evaluated.step, evaluated.groups)
        return evaluated.step, evaluated.metrics

    @property
    def evaluates(self) -> bool:
        """Whether an evaluation is due after the steps done."""
        return self.config.eval.due(self.done, self.config.run.steps)

    @property
    def awaits_evaluation(self) -> bool:
        """Whether what comes after the evaluation needs its result: a checkpoint that is ranked by it, or the end."""
        settings = self.config.checkpoint
        ranked = settings.keep_best > 0 and settings.best_metric.startswith("val/")
        return self.done == self.config.run.steps or (self.saves and ranked)

    @property
    def saves(self) -> bool:
        """Whether a checkpoint is due after the steps done."""
        since_s, write_s = self._clock() - self._saved_at, self._checkpoints.write_s
        return self.config.checkpoint.due(self.done, self.config.run.steps, since_s=since_s, write_s=write_s)


class TooManyFailed(RuntimeError):
    """Too many samples have no verdict; the message has the share, the first cause, and what to do."""


class _Verdicts:
    """The samples without a verdict of the last steps. limit: `reward.max_failed`.

    It begins with every start of a run: the cause may be fixed before a resume. Of the first step of all, where no
    verdict was ever given, one batch is enough.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._steps: deque[tuple[int, float, Counter[str]]] = deque(maxlen=_VERDICT_STEPS)

    def problem(self, step: int, batch: Batch) -> str:
        """Take in all samples of a step, dropped groups included; returns why the run must end, or ""."""
        samples = [trajectory for group in batch.groups for trajectory in group.trajectories]
        missing = Counter(each.no_verdict.reason for each in samples if each.no_verdict is not None)
        self._steps.append((step, missing.total() / max(1, len(samples)), missing))
        steps, shares, reasons = zip(*self._steps, strict=True)
        share = statistics.fmean(shares)
        judged = len(steps) == _VERDICT_STEPS or (step == 1 and share == 1)
        if share <= self._limit or not judged:
            return ""
        ((reason, _),) = sum(reasons, Counter[str]()).most_common(1)
        return (
            f"{share:.0%} of the samples of steps {steps[0]} to {step} have no verdict, more than reward.max_failed"
            f" = {self._limit:g} allows, most of them as {reason}. The state after step {step} is saved: mend the "
            "reward function, or what it calls (--dry-run tries it on one trajectory), and continue with "
            "run.resume=auto, or raise reward.max_failed"
        )
