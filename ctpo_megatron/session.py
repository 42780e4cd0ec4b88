"""What only rank 0 owns in a run: its directory, display, sandbox, engines and scorers; callable from every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from ctpo_megatron.config import Config
from ctpo_megatron.data import Group, Prompt, PromptSampler, load_prompts, prepare
from ctpo_megatron.observe import (
    Display,
    MetricsWriter,
    PhaseTimer,
    evaluation_metrics,
    open_run_directory,
    print_summary,
    reward_metrics,
    write_report,
    write_trajectories,
)
from ctpo_megatron.policy import Layout, Policy
from ctpo_megatron.rewards import RewardPool
from ctpo_megatron.rollout import TOOL_SCHEMA, RolloutFleet, Sampling, rollout_metrics
from ctpo_sandbox import start_server


class Session:
    """One run as seen from every rank: rank 0 acts, the others receive the result or the news that it failed."""

    def __init__(self, config: Config, layout: Layout) -> None:
        self.config = config
        self.layout = layout
        self._exit = ExitStack()
        self.is_first = layout.rank == 0
        self.directory: Path = layout.first(lambda: open_run_directory(config))
        self.timer = PhaseTimer(self.directory if self.is_first else None)
        if self.is_first:
            self._metrics = self._exit.enter_context(MetricsWriter(self.directory, config.observe.tensorboard))
            title = f"{config.run.name}, {config.objective.preset}"
            self._display = self._exit.enter_context(Display(config.observe.live, config.run.steps, title=title))
            self._display.note(f"writing to {self.directory}")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: Any) -> None:
        self._exit.__exit__(*error)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Show and time one stage of the run."""
        if self.is_first:
            self._display.stage(name)
        with self.timer.stage(name):
            yield

    def prepare(self) -> None:
        """Stage (a): build the synthetic task and the tiny model when the configuration asks for them."""
        if self.config.prepare is not None:
            with self.stage("prepare"):
                self.layout.first(lambda: prepare(self.config.prepare))

    def open_world(self) -> None:
        """Read the prompts and start sandbox, engines and scorers; the engines load in the background."""
        self.layout.first(self._open_world)

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
        held_out = load_prompts(config.data.eval, tokenizer, **reading) if config.data.eval else []
        self._held_out: list[Prompt] = held_out[: config.eval.prompts]
        self._fleet = RolloutFleet(config, config.model.path, config.run.seed, self._sandbox_url())
        self._exit.enter_context(self._fleet)
        self._fleet.start()
        self._scorers = self._exit.enter_context(RewardPool(config.reward))

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

    def collect(self, step: int) -> tuple[list[Group], dict[str, float]]:
        """The scored groups of RL step `step`, sampled with the weights of the last `sync`, and their metrics."""
        rollout = self.config.rollout
        sampling = Sampling(rollout.temperature, rollout.top_p, rollout.top_k)
        return self.layout.first(
            lambda: self._play(
                self._sampler.take(rollout.prompts_per_step), step, rollout.samples_per_prompt, sampling, self.timer
            )
        )

    def _play(
        self, prompts: list[Prompt], step: int, samples: int, sampling: Sampling, timer: PhaseTimer
    ) -> tuple[list[Group], dict[str, float]]:
        with timer.phase("rollout"):
            groups = self._fleet.generate(prompts, step=step, samples=samples, sampling=sampling)
        with timer.phase("reward"):
            report = self._scorers.score([(t, group.prompt.answer) for group in groups for t in group.trajectories])
        fleet = {f"rollout/{name}": value for name, value in self._fleet.stats().items()}
        return groups, rollout_metrics(groups) | reward_metrics(groups, report) | fleet

    def evaluate(self, step: int) -> dict[str, float]:
        """Score the held-out prompts with the weights of the last `sync`; empty without `data.eval`."""
        return self.layout.first(lambda: self._evaluate(step))

    def _evaluate(self, step: int) -> dict[str, float]:
        if not self._held_out:
            return {}
        settings = self.config.eval
        sampling = Sampling(settings.temperature, 1.0, 0)
        with self.timer.phase("eval"):
            groups, _ = self._play(self._held_out, step, settings.samples, sampling, PhaseTimer())
            self._dump(step, groups, "evaluation")
        return evaluation_metrics(groups)

    def sync(self, policy: Policy, version: int) -> None:
        """Give the policy's present weights to all engines as `version`, and them the device's memory; collective."""
        with self.timer.phase("sync"):
            if self.is_first:
                self._fleet.sync(policy.weights(), version)
            else:
                for _ in policy.weights():
                    pass
        policy.release()

    def log(
        self,
        step: int,
        metrics: Mapping[str, float],
        groups: list[Group] | None = None,
        traces: Mapping[tuple[str, int], Mapping[str, Any]] | None = None,
    ) -> None:
        """Write and show the metrics of a step and the time since the last call; more calls for one step add up.

        groups: the trajectories of an RL step, dumped with what `traces` adds by (prompt id, sample index).
        """
        if not self.is_first:
            return
        metrics = {**metrics, **self.timer.metrics()}
        if "time/step" in metrics and "tokens/total" in metrics:
            metrics["tokens/per_second"] = metrics["tokens/total"] / metrics["time/step"]
        self._metrics.log(step, metrics)
        if groups is not None:
            self._display.step(step, metrics)
            if self.config.observe.trajectories:
                self._dump(step, groups, "trajectories", traces)

    def _dump(
        self, step: int, groups: list[Group], folder: str, traces: Mapping[tuple[str, int], Any] | None = None
    ) -> None:
        write_trajectories(self.directory, step, groups, self._decode, folder=folder, extra=traces)

    def warmup_progress(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Write and show one supervised step."""
        if not self.is_first:
            return
        if step == 1:
            writer = MetricsWriter(self.directory, self.config.observe.tensorboard, "warmup.jsonl")
            writer.truncate_after(0)  # lines of an interrupted attempt
            self._warmup = self._exit.enter_context(writer)
        self._warmup.log(step, metrics)
        self._display.progress(step, total, metrics)

    def sampler_state(self) -> dict[str, int]:
        """Where the prompt order stands (rank 0; empty elsewhere)."""
        return self._sampler.state_dict() if self.is_first else {}

    def start_over(self) -> None:
        """Forget everything that was logged: the run was interrupted before its first checkpoint."""
        if self.is_first:
            self._metrics.truncate_after(-1)

    def rewind(self, step: int, sampler: Mapping[str, int]) -> None:
        """Go on after `step`: the prompt order as saved, and what was logged later forgotten (it comes again)."""
        if self.is_first:
            self._sampler.load_state_dict(sampler)
            self._metrics.truncate_after(step)

    def finish(self) -> None:
        """Write the report and print the summary."""
        if not self.is_first:
            return
        with self.stage("report"):
            if self.config.observe.report:
                write_report(self.directory)
        self._display.stop()
        print_summary(self.directory)


def check_mismatch(config: Config, metrics: Mapping[str, float]) -> None:
    """Stop when sampler and trainer disagree beyond the limit: the weights in the engines are not the policy's."""
    limit, found = config.rollout.mismatch_limit, metrics["mismatch/logp_abs_max"]
    if limit is not None and not found <= limit:  # a NaN is beyond every limit
        raise RuntimeError(
            f"sampler and trainer log-probs differ by up to {found:.3g}, more than rollout.mismatch_limit={limit}: "
            "a weight sync did not arrive, or the two sides compute in different precision"
        )
