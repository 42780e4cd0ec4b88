"""What only rank 0 owns in a run: its directory, display, sandbox, engines and scorers; callable from every rank."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from ctpo_megatron.config import Config
from ctpo_megatron.data import Group, Prompt, PromptSampler, load_prompts, prepare
from ctpo_megatron.policy import (
    CheckpointError,
    Layout,
    Policy,
    discard_checkpoints,
    latest_checkpoint,
    peak_flops,
)
from ctpo_megatron.rewards import RewardPool
from ctpo_megatron.rollout import TOOL_SCHEMA, Cancelled, Replay, RolloutFleet, Sampling, rollout_metrics
from ctpo_megatron.run.directory import open_run_directory
from ctpo_megatron.run.preemption import Preemption
from ctpo_megatron.tracking import (
    Display,
    MetricsWriter,
    PhaseTimer,
    discard_dumps,
    evaluation_metrics,
    open_trackers,
    phase_peaks,
    print_summary,
    read_trajectories,
    reward_metrics,
    sft_metrics,
    throughput_metrics,
    trajectory_files,
    trajectory_of,
    write_report,
    write_trajectories,
)
from ctpo_sandbox import start_server

log = logging.getLogger(__name__)


class Session:
    """One run as seen from every rank: rank 0 acts, the others receive the result or the news that it failed."""

    def __init__(self, config: Config, layout: Layout, preemption: Preemption) -> None:
        self.config = config
        self.layout = layout
        self._preemption = preemption
        self._saved: int | None = None
        self._exit = ExitStack()
        self.is_rank_zero = layout.rank == 0
        self.directory: Path = layout.on_rank_zero(lambda: open_run_directory(config))
        self.timer = PhaseTimer(self.directory if self.is_rank_zero else None)
        engines = config.rollout.engines * config.rollout.engine.tensor_parallel_size
        self._peaks = phase_peaks(
            config.tracking.peak_flops or peak_flops(config.policy),
            trainers=layout.world_size,
            engines=engines if config.rollout.replay is None else 0,  # reading a file is no sampling
        )
        if self.is_rank_zero:
            self._trackers = self._exit.enter_context(open_trackers(config, self.directory))
            self._metrics = self._exit.enter_context(MetricsWriter(self.directory, self._trackers))
            title = f"{config.run.name}, {config.objective.preset}"
            self._display = self._exit.enter_context(Display(config.tracking.live, config.run.steps, title=title))
            self._display.note(f"writing to {self.directory}")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: Any) -> None:
        self._exit.__exit__(*error)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Show and time one stage of the run."""
        if self.is_rank_zero:
            self._display.stage(name)
        with self.timer.stage(name):
            yield

    def prepare(self) -> None:
        """Stage (a): build the synthetic task and the tiny model when the configuration asks for them."""
        if self.config.prepare is not None:
            with self.stage("prepare"):
                self.layout.on_rank_zero(lambda: prepare(self.config.prepare))

    def open_world(self) -> None:
        """Read the prompts and start sandbox, engines and scorers; the engines load in the background."""
        self.layout.on_rank_zero(self._open_world)

    def _open_world(self) -> None:
        config = self.config
        tokenizer = AutoTokenizer.from_pretrained(config.model.path)
        self._decode: Callable[[list[int]], str] = tokenizer.decode
        reading = {
            "max_prompt_tokens": config.data.max_prompt_tokens,
            "tool_schema": TOOL_SCHEMA if config.data.tool_in_prompt else None,
            "chat_template_kwargs": config.model.chat_template_kwargs,
        }
        prompts = load_prompts(config.data.train, tokenizer, **reading)
        self._sampler = PromptSampler(prompts, config.run.seed, config.data.shuffle)
        # A recording has no answers of these weights to the held-out prompts.
        evaluates = config.data.eval and config.rollout.replay is None
        held_out = load_prompts(config.data.eval, tokenizer, **reading) if evaluates else []
        self._held_out: list[Prompt] = held_out[: config.eval.prompts]
        self._fleet = self._rollout_side()
        self._exit.enter_context(self._fleet)
        self._fleet.start()
        self._scorers = self._exit.enter_context(RewardPool(config.reward))

    def _rollout_side(self) -> RolloutFleet | Replay:
        config = self.config
        if config.rollout.replay is None:
            return RolloutFleet(config, config.model.path, config.run.seed, self._sandbox_url())
        recorded = trajectory_files(Path(config.rollout.replay))
        return Replay(lambda step: [trajectory_of(record) for record in read_trajectories(recorded[step])])

    def _sandbox_url(self) -> str:
        sandbox = self.config.sandbox
        if sandbox.url is not None:
            return sandbox.url
        server = start_server(
            slots=sandbox.slots,
            memory_mb=sandbox.memory_mb,
            max_run_timeout_s=sandbox.run_timeout_s,
            start_timeout_s=sandbox.start_timeout_s,
            require=sandbox.require,
            log_path=self.directory / "logs" / "sandbox.log",
        )
        return self._exit.enter_context(server).url

    def collect(self, step: int) -> tuple[list[Group], dict[str, float]] | None:
        """The scored groups of RL step `step`, sampled with the weights of the last `sync`, and their metrics.

        None when rank 0 was asked to end while they were sampled: no prompt counts as consumed then.
        """
        return self.layout.on_rank_zero(lambda: self._collect(step))

    def _collect(self, step: int) -> tuple[list[Group], dict[str, float]] | None:
        rollout = self.config.rollout
        sampling = Sampling(rollout.temperature, rollout.top_p, rollout.top_k)
        before = self._sampler.state_dict()
        prompts = self._sampler.take(rollout.prompts_per_step)
        try:
            return self._play(prompts, step, rollout.samples_per_prompt, sampling, self.timer)
        except Cancelled:
            self._sampler.load_state_dict(before)
            return None

    def _play(
        self, prompts: list[Prompt], step: int, samples: int, sampling: Sampling, timer: PhaseTimer
    ) -> tuple[list[Group], dict[str, float]]:
        with timer.phase("rollout"):
            groups = self._fleet.generate(
                prompts, step=step, samples=samples, sampling=sampling, cancelled=self._preemption.asked
            )
        with timer.phase("reward"):
            report = self._scorers.score([(t, group.prompt.answer) for group in groups for t in group.trajectories])
        fleet = {f"rollout/{name}": value for name, value in self._fleet.stats().items()}
        return groups, rollout_metrics(groups) | reward_metrics(groups, report) | fleet

    def is_evaluated(self, step: int) -> bool:
        """Whether the configuration asks for an evaluation after RL step `step`."""
        every = self.config.eval.every
        return step in (0, self.config.run.steps) or bool(every and step % every == 0)

    def lacks_evaluation(self, step: int) -> bool:
        """Whether the evaluation after `step`, the latest that was logged, was left out because the job had to end."""
        return self.layout.on_rank_zero(
            lambda: bool(
                self._held_out
                and self.is_evaluated(step)
                and not any(name.startswith("val/") for name in self._metrics.latest)
            )
        )

    def evaluate(self, step: int) -> dict[str, float]:
        """Score the held-out prompts with the weights of the last `sync`; empty without `data.eval`, or when rank 0 was
        asked to end meanwhile."""
        return self.layout.on_rank_zero(lambda: self._evaluate(step))

    def _evaluate(self, step: int) -> dict[str, float]:
        if not self._held_out:
            return {}
        settings = self.config.eval
        sampling = Sampling(settings.temperature, 1.0, 0)
        with self.timer.phase("eval"):
            try:
                groups, _ = self._play(self._held_out, step, settings.samples, sampling, PhaseTimer())
            except Cancelled:
                return {}
            self._dump(step, groups, "evaluation")
        return evaluation_metrics(groups)

    def sync(self, policy: Policy, version: int) -> None:
        """Give the policy's present weights to all engines as `version`, and them the device's memory; collective."""
        with self.timer.phase("sync"):
            if self.is_rank_zero:
                self._fleet.sync(policy.weights(), version)
            else:
                deque(policy.weights(), maxlen=0)  # a loop would keep each tensor while the next one is gathered
        policy.release()

    def log(
        self,
        step: int,
        metrics: Mapping[str, float],
        groups: list[Group] | None = None,
        diagnostics: Mapping[tuple[str, int], Mapping[str, Any]] | None = None,
    ) -> None:
        """Write and show the metrics of a step and the time since the last call; more calls for one step add up.

        groups: the trajectories of an RL step, dumped with what `diagnostics` adds by (prompt id, sample index).
        """
        if not self.is_rank_zero:
            return
        metrics = {**metrics, **self.timer.metrics()}
        if "time/step" in metrics and "tokens/total" in metrics:
            metrics["tokens/per_second"] = metrics["tokens/total"] / metrics["time/step"]
        metrics |= throughput_metrics(metrics, self._peaks)
        self._metrics.log(step, metrics)
        if groups is not None:
            self._display.step(step, metrics)
            if self.config.tracking.trajectories:
                self._dump(step, groups, "trajectories", diagnostics)

    def _dump(
        self, step: int, groups: list[Group], folder: str, diagnostics: Mapping[tuple[str, int], Any] | None = None
    ) -> None:
        write_trajectories(self.directory, step, groups, self._decode, folder=folder, extra=diagnostics)

    def sft_progress(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Write and show one supervised step from the metrics of its update and the time since the last."""
        if not self.is_rank_zero:
            return
        if step == 1:
            writer = MetricsWriter(self.directory, self._trackers, "sft.jsonl")
            writer.truncate_after(0)  # lines of an interrupted attempt
            self._sft = self._exit.enter_context(writer)
        metrics = {**metrics, **self.timer.metrics()}
        found = sft_metrics(metrics | throughput_metrics(metrics, self._peaks))
        self._sft.log(step, found)
        shown = ("sft/loss", "sft/grad_norm", "sft/lr", "sft/tokens_per_s")
        self._display.progress(step, total, {name: found[name] for name in shown})

    def save(self, policy: Policy, step: int, version: int) -> None:
        """Checkpoint the policy, whose weights the engines hold as `version`, and the run's state after `step`."""
        settings = self.config.checkpoint
        with self.timer.phase("checkpoint"):
            # Only rank 0's state is kept. No group of trajectories is in it: none waits between two steps.
            state = self._state(step, version) if self.is_rank_zero else {}
            score = self._score(step) if self.is_rank_zero else None
            policy.save(self.directory / "checkpoints", step, state, settings, score)
            policy.release()
        self._saved = step
        self.log(step, {})

    def secure(self, policy: Policy, step: int, version: int) -> None:
        """Save the state after `step`, unless it is saved, and wait until the checkpoint is complete."""
        self.timer.metrics()  # of a step that was cut short, they belong to no line
        policy.finish_save()
        if self._saved != step:
            self.save(policy, step, version)
            policy.finish_save()

    def _score(self, step: int) -> float | None:
        settings = self.config.checkpoint
        score = self._metrics.latest.get(settings.best_metric)
        if settings.keep_best and score is None:
            log.warning("step %d has no %s (checkpoint.best_metric): not among the best", step, settings.best_metric)
        return score

    def _state(self, step: int, version: int) -> dict[str, Any]:
        return {
            "step": step,
            "weights_version": version,
            "sampler": self._sampler.state_dict(),
            "metrics": self._metrics.latest,
        }

    def find_checkpoint(self) -> Path | None:
        """The checkpoint to continue from: `checkpoint.load`, else the newest of a run that is resumed, else none."""
        if self.config.checkpoint.load is not None:
            return Path(self.config.checkpoint.load)
        if not self.config.run.resume:
            return None
        return self.layout.on_rank_zero(lambda: latest_checkpoint(self.directory / "checkpoints"))

    def resume(self, policy: Policy, checkpoint: Path | None) -> tuple[int, int]:
        """Restore policy and run from `checkpoint`; the RL steps done, and the version of the weights.

        What lies beyond is given up: checkpoints, dumps and lines of metrics are kept under names that nothing reads.
        Without a checkpoint the run starts from its beginning. Raises CheckpointError when the checkpoint is damaged,
        of another model, or of a run on other prompts.
        """
        if checkpoint is None:
            self.layout.on_rank_zero(self._start_over)
            return 0, 1
        state = policy.load(checkpoint)
        policy.set_scheduler_step(state["step"] / self.config.run.steps)
        if checkpoint.resolve().parent == (self.directory / "checkpoints").resolve():
            self._saved = state["step"]
        self.layout.on_rank_zero(lambda: self._rewind(checkpoint, state))
        return state["step"], state["weights_version"]

    def _start_over(self) -> None:
        lost = self._metrics.latest["step"]
        if lost > 0:
            log.warning(
                "%s has no checkpoint: its %d steps are given up, and it starts from its beginning. If it was begun "
                "with checkpoint.load, stop it and give that again",
                self.directory,
                lost,
            )
        self._discard(after=-1)

    def _rewind(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        try:
            self._sampler.load_state_dict(state["sampler"])
        except ValueError as error:
            raise CheckpointError(f"{checkpoint} does not fit this run: {error}") from error
        self._discard(state["step"], state["metrics"])
        self._display.note(f"continuing after step {state['step']}, from {checkpoint}")

    def _discard(self, after: int, record: Mapping[str, Any] | None = None) -> None:
        # Checkpoints first: a plain resume after a kill in between then rewinds to the same step again.
        renamed = discard_checkpoints(self.directory / "checkpoints", after)
        if renamed:
            log.warning(
                "checkpoint.load=%s gives up later checkpoints of this run, now named %s. Leave checkpoint.load out "
                "from now on: with it every restart begins there again",
                self.config.checkpoint.load,
                ", ".join(path.name for path in reversed(renamed)),
            )
        discard_dumps(self.directory, after)
        self._metrics.truncate_after(after, record)

    def finish(self) -> None:
        """Write the report and print the summary."""
        if not self.is_rank_zero:
            return
        with self.stage("report"):
            if self.config.tracking.report:
                write_report(self.directory)
        self._display.stop()
        print_summary(self.directory)


def check_mismatch(config: Config, metrics: Mapping[str, float]) -> None:
    """Stop when sampler and trainer disagree beyond the limit: the weights in the engines are not the policy's."""
    limit, found = config.rollout.mismatch_limit, metrics["mismatch/log_prob_abs_max"]
    if limit is not None and not found <= limit:  # a NaN is beyond every limit
        raise RuntimeError(
            f"sampler and trainer log-probs differ by up to {found:.3g}, more than rollout.mismatch_limit={limit}: "
            "a weight sync did not arrive, or the two sides compute in different precision"
        )
