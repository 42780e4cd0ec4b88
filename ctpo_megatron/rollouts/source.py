"""Where training batches come from: the protocol of rollout sources, and the one that samples with current weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from ctpo_megatron.config import RolloutConfig
from ctpo_megatron.data.batch import Batch, Group
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.engines.tasks import Cancelled, Sampling
from ctpo_megatron.rollouts.filters import Filters
from ctpo_megatron.rollouts.groups import PromptStream, UniformGroups
from ctpo_megatron.rollouts.metrics import rollout_metrics
from ctpo_megatron.rollouts.quarantine import Quarantined

if TYPE_CHECKING:
    import torch

Phase = Callable[[str], Any]
"""Times a part of the step: `with phase("rollout"): ...`."""


class RolloutSource(Protocol):
    """Hands over scored batches in prompt order and takes new weights; lives on rank zero."""

    def next_batch(self, step: int) -> Batch | None:
        """The batch of RL step `step`; None when the run is asked to end, and no prompt counts as consumed then."""

    def publish(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Sample with these weights (Hugging Face names, full shapes) from now on, and say so: they are `version`.

        Returns when the tensors are not needed any more, perhaps before the engines have taken them.
        """

    def updating(self, version: int) -> AbstractContextManager[None]:
        """Within, the engines are given weights `version`, by `publish` or otherwise; later samples are of them."""

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, so that a resumed run gets the batches that this one would have got."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`. Raises ValueError when it is of other prompts."""


class Engines(Protocol):
    """Plays episodes: `EnginePool`, or `Replay` from a recording."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        step: int,
        samples: int,
        sampling: Sampling,
        cancelled: Callable[[], bool] = ...,
        replacement: Callable[[], Prompt] | None = ...,
        enough: int | None = ...,
        each: Callable[[Group], None] = ...,
    ) -> list[Group]:
        """A group of `samples` trajectories for every prompt, in order; of the `enough` prompts that are done first.

        each: is given every group that is returned, when it is complete. A prompt that fails too often is
        quarantined; `replacement()` gives another, without it the group is left out.
        """

    @property
    def quarantined(self) -> list[Quarantined]:
        """Prompts that failed too often, oldest first; a resumed run puts those here that it had before."""

    def begin_sync(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Take these weights as `version`: what is asked for from now on is of them."""

    def stats(self) -> dict[str, float]:
        """Counts and seconds since the last call."""


class Pending(Protocol):
    """Scores that are on their way."""

    @property
    def done(self) -> bool:
        """Whether `result` has nothing to wait for."""

    def result(self) -> Any:
        """Set the rewards; the report of what happened."""


class Scorer(Protocol):
    """Rewards trajectories in the background; a batch may be given in several calls."""

    def begin(self, groups: Sequence[Group]) -> Pending:
        """Begin to score, and return at once."""

    def metrics(self, groups: Sequence[Group], reports: Sequence[Any]) -> dict[str, float]:
        """`reward/*` of scored groups, given the reports of all calls that scored them."""


class Collector:
    """Generates groups and scores each as it is complete; used for training and for evaluation."""

    def __init__(self, engines: Engines, scorer: Scorer, cancelled: Callable[[], bool]) -> None:
        """cancelled: asked about every second; when true, `collect` raises Cancelled. It may raise, too."""
        self._engines, self._scorer, self._cancelled = engines, scorer, cancelled

    def collect(
        self,
        prompts: Sequence[Prompt],
        *,
        step: int,
        samples: int,
        sampling: Sampling,
        phase: Phase,
        replacement: Callable[[], Prompt] | None = None,
        further: Callable[[Sequence[Group]], Sequence[Prompt]] = lambda _: (),
        cancelled: Callable[[], bool] | None = None,
        enough: int | None = None,
    ) -> tuple[list[Group], dict[str, float]]:
        """Scored groups of the prompts and their metrics. Raises what `Engines.generate` raises.

        Without `replacement` there may be fewer groups than prompts, or none. further: given all scored groups, in the
        order of sampling, it returns prompts to sample next; none: the groups are complete. cancelled: asked in
        the place of what the collector asks. enough: groups that need not be waited for are left out.
        """
        sampling_s = 0.0
        groups: list[Group] = []
        reports: list[Any] = []
        pending: dict[int, Pending] = {}

        def score(group: Group) -> None:
            pending[id(group)] = self._scorer.begin([group])

        while prompts:
            began = time.monotonic()
            with phase("rollout"):
                sampled = self._engines.generate(
                    prompts,
                    step=step,
                    samples=samples,
                    sampling=sampling,
                    cancelled=cancelled or self._cancelled,
                    replacement=replacement,
                    enough=enough,
                    each=score,
                )
            sampling_s += time.monotonic() - began
            with phase("reward"):
                reports += [pending[id(group)].result() for group in sampled]
            groups += sampled
            prompts = further(groups)
        scores = self._scorer.metrics(groups, reports) if groups else {}
        return groups, rollout_metrics(groups) | scores | {"rollout/generate_s": sampling_s}


class SampledRollouts:
    """Samples every batch when it is asked for, with the weights published last: a `RolloutSource`."""

    def __init__(
        self,
        config: RolloutConfig,
        collector: Collector,
        engines: Engines,
        prompts: PromptStream,
        phase: Phase,
        *,
        mini_batch_prompts: int = 1,
    ) -> None:
        """mini_batch_prompts: groups of an optimizer step, of which a batch has a whole number of times."""
        self._config, self._collector, self._engines = config, collector, engines
        self._prompts, self._phase, self._mini_batch_prompts = prompts, phase, mini_batch_prompts
        self._filters = Filters(config.filters)

    def next_batch(self, step: int) -> Batch | None:
        """See `RolloutSource`."""
        config = self._config
        uniform = UniformGroups(config, self._prompts, self._mini_batch_prompts)
        before = self._prompts.state_dict()
        try:
            sampled, metrics = self._collector.collect(
                self._prompts.take(config.prompts_per_step + config.oversample),
                step=step,
                samples=config.samples_per_prompt,
                sampling=Sampling(config.temperature, config.top_p, config.top_k),
                phase=self._phase,
                replacement=lambda: self._prompts.take(1)[0],
                further=uniform.further,
                enough=config.prompts_per_step if config.oversample else None,
            )
        except Cancelled:
            self._prompts.load_state_dict(before)
            return None
        metrics |= {f"rollout/{name}": value for name, value in self._engines.stats().items()}
        batch = assemble(sampled, metrics, uniform, self._filters)
        batch.sampler = self._prompts.state_dict()
        return batch

    def publish(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See `RolloutSource`."""
        self._engines.begin_sync(named_tensors, version)

    def updating(self, version: int) -> AbstractContextManager[None]:
        """See `RolloutSource`; nothing is in flight then."""
        return nullcontext()

    def state_dict(self) -> dict[str, Any]:
        """Position of the prompt stream, and the prompts that were quarantined."""
        quarantined = [asdict(record) for record in self._engines.quarantined]
        return {"prompts": self._prompts.state_dict(), "quarantined": quarantined}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `RolloutSource`."""
        if batches := state.get("ahead", {}).get("batches"):
            raise ValueError(
                f"it holds what was sampled ahead for {len(batches)} batches, and this run samples none "
                "(rollout.max_staleness: 0): go on with the rollout.max_staleness that it was begun with"
            )
        self._prompts.load_state_dict(state["prompts"])
        self._engines.quarantined[:] = [Quarantined(**record) for record in state["quarantined"]]


def assemble(sampled: Sequence[Group], metrics: Mapping[str, float], uniform: UniformGroups, filters: Filters) -> Batch:
    """The batch of scored groups, given the metrics of sampling and scoring. Some are dropped, loss masks written."""
    dropped = uniform.dropped(sampled)
    groups = [group for place, group in enumerate(sampled) if place not in dropped]
    repeated = len(sampled) - len({group.prompt.id for group in sampled})
    found = {**metrics, "rollout/prompts_repeated": float(repeated)}
    found |= uniform.metrics(sampled, len(dropped)) | filters.apply(groups)
    versions = {v for group in groups for t in group.trajectories for v in t.weight_version if v >= 0}
    return Batch(groups, found, tuple(sorted(versions)), dropped=dropped)
