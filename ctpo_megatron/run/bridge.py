"""What rank zero owns, as every rank calls it: rank zero acts, the others wait for the result or its failure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

from ctpo_megatron.config import Config
from ctpo_megatron.data import Batch
from ctpo_megatron.engines import EnginePool, give_way_to_engines
from ctpo_megatron.engines.weights import WeightTransport
from ctpo_megatron.policy import Layout, Trainer, capabilities
from ctpo_megatron.rollouts import Evaluated
from ctpo_megatron.run.reporter import Reporter
from ctpo_megatron.run.services import Services
from ctpo_megatron.run.transports import make_transport


class Bridge:
    """Rollouts and evaluation for all ranks; every method is collective.

    Where engines and trainer share GPUs (`shared`) they take turns: engines wake to sample, and sleep to `give_way`.
    """

    def __init__(
        self,
        layout: Layout,
        services: Services | None,
        report: Reporter,
        config: Config,
        *,
        shared: bool = False,
    ) -> None:
        """services: None on ranks other than zero. shared: the engines start now and sleep. vLLM measures a GPU when it
        starts, so the trainer must take memory afterwards."""
        self._layout, self._services, self._report, self._config = layout, services, report, config
        self._transport: WeightTransport | None = None
        self._shared, self._awake = shared, True
        self._ahead = config.rollout.max_staleness > 0
        self._yields = self._ahead and not capabilities().cuda
        self._evaluating = False
        self.give_way(level=2)

    def next_batch(self, step: int, policy: Trainer) -> Batch | None:
        """The batch of a step, without groups and metrics on ranks other than zero; None when the run is to end."""
        batch: Batch | None = None

        def sample() -> Batch | None:
            nonlocal batch
            batch = self._rank_zero.rollouts.next_batch(step)
            return None if batch is None else Batch([], weight_versions=batch.weight_versions)

        self._wake(policy)
        if self._yields:  # now that the thread of the rollouts has begun, which would do the same
            self._yields = False
            give_way_to_engines()
        # A batch that is sampled now times its own phases.
        with self._report.phase("wait_rollout") if self._ahead else nullcontext():
            outline = self._layout.on_rank_zero(sample)
        if outline is not None:
            self.give_way(level=2)  # these weights are used up: the next ones come before the next sampling
        return batch if self._layout.is_rank_zero else outline

    def publish(self, policy: Trainer, version: int) -> None:
        """Send the current weights to every engine as `version`, then free the trainer's device memory for them."""
        transport = self._transport or self._start()
        with self._report.phase("publish"), self._updating(version):
            transport.send(policy, version)
            self._wake(policy)
        policy.release()

    @contextmanager
    def _updating(self, version: int) -> Iterator[None]:
        """On rank zero `RolloutSource.updating`, which the others wait for."""
        with ExitStack() as stack:
            if self._ahead:
                self._layout.on_rank_zero(lambda: stack.enter_context(self._rank_zero.rollouts.updating(version)))
            yield

    def _start(self) -> WeightTransport:
        """Wait until the engines are up, and open the way for their weights."""
        with self._report.phase("engine_start"):
            self._report.note("waiting for the engines to load")
            # Kept before `init`, which may fail: what it opened until then is closed at the end.
            transport = self._transport = make_transport(self._layout, self._services, self._config)
            transport.init()
        return transport

    def check_start(self) -> None:
        """Raises FleetError as soon as it is known that the engines, which load in the background, do not start."""

        def check() -> None:
            if (pool := self._rank_zero.pool) is not None:  # a recording has none
                pool.check_start()

        self._layout.on_rank_zero(check)

    def __enter__(self) -> Bridge:
        return self

    def __exit__(self, *_: object) -> None:
        """Release what the weights travel by; not collective."""
        if self._transport is not None:
            self._transport.close()

    def evaluate(self, step: int, policy: Trainer, *, awaited: bool) -> None:
        """Answer the held-out prompts with the weights at hand, for the line of `step`.

        Where engines sample ahead the trainer goes on meanwhile, unless the result is `awaited`: `end_evaluation` comes
        before the next weights, as all answers are to be those of one version.
        """
        if self._ahead and not awaited:
            self._layout.on_rank_zero(lambda: self._rank_zero.evaluation.begin(step))
            self._evaluating = True
            return
        self._wake(policy)
        _, metrics = self._layout.on_rank_zero(lambda: self._reported(self._rank_zero.evaluation.run(step)))
        self._report.log(step, metrics)

    def end_evaluation(self) -> None:
        """Wait for the evaluation that goes on, if there is one, and add it to the line of its step, the latest."""
        if self._evaluating:
            self._evaluating = False
            found = self._layout.on_rank_zero(lambda: self._reported(self._rank_zero.evaluation.end()))
            self._report.log_evaluation(*found)

    def _reported(self, evaluated: Evaluated | None) -> tuple[int, dict[str, float]]:
        """Keep the answers of an evaluation; its step and metrics."""
        assert evaluated is not None
        if evaluated.missing:
            self._report.note(f"[eval] step {evaluated.step}: MISSING, stop requested meanwhile ({evaluated.missing})")
        if evaluated.groups:
            self._report.dump_evaluation(evaluated.step, evaluated.groups)
        return evaluated.step, evaluated.metrics

    def settle(self) -> None:
        """Wait for what goes on behind the training: an evaluation, and engines that take the last weights.

        Raises what became of them.
        """
        self.end_evaluation()
        self._layout.on_rank_zero(self._finish_update)

    def _finish_update(self) -> None:
        if (pool := self._rank_zero.pool) is not None:  # a recording has none
            pool.finish_update()

    def lacks_evaluation(self) -> bool:
        """Whether the latest step was logged without an evaluation."""
        lacks: bool = self._layout.on_rank_zero(lambda: self._rank_zero.evaluation.lacks(self._report.latest))
        return lacks

    def give_way(self, level: int = 1) -> None:
        """Before the trainer uses shared GPUs: the engines sleep. Level 1 keeps their weights, 2 does not."""
        if self._shared and self._awake:
            self._layout.on_rank_zero(lambda: self._pool.sleep(level))
            self._awake = False

    def _wake(self, policy: Trainer) -> None:
        """Before engines sample on shared GPUs: every rank leaves them, then the engines wake."""
        if self._shared and not self._awake:
            policy.release()
            self._layout.wait_for_ranks()
            self._layout.on_rank_zero(lambda: self._pool.wake())
            self._awake = True

    @property
    def _rank_zero(self) -> Services:
        assert self._services is not None  # asked for in actions of rank zero only
        return self._services

    @property
    def _pool(self) -> EnginePool:
        assert self._rank_zero.pool is not None  # a recording shares no GPUs
        return self._rank_zero.pool
