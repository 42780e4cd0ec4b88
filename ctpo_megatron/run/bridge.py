"""What rank zero owns, as every rank calls it: rank zero acts, the others wait for the result or its failure."""

from __future__ import annotations

from ctpo_megatron.data import RolloutBatch
from ctpo_megatron.policy import Layout, Policy
from ctpo_megatron.run.reporter import Reporter
from ctpo_megatron.run.services import Services
from ctpo_megatron.weights import RankZeroTransport, WeightTransport


class Bridge:
    """Rollouts and evaluation for all ranks; every method is collective."""

    def __init__(self, layout: Layout, services: Services | None, report: Reporter) -> None:
        """services: None on ranks other than zero."""
        self._layout, self._services, self._report = layout, services, report
        self._transport: WeightTransport = RankZeroTransport(None if services is None else services.rollouts)

    def next_batch(self, step: int) -> RolloutBatch | None:
        """The batch of a step, without groups and metrics on ranks other than zero; None when the run is to end."""
        batch: RolloutBatch | None = None

        def sample() -> RolloutBatch | None:
            nonlocal batch
            batch = self._rank_zero.rollouts.next_batch(step)
            return None if batch is None else RolloutBatch([], weight_versions=batch.weight_versions)

        outline = self._layout.on_rank_zero(sample)
        return batch if self._layout.is_rank_zero else outline

    def publish(self, policy: Policy, version: int) -> None:
        """Send the current weights to every engine as `version`, then free the trainer's device memory for them."""
        with self._report.phase("sync"):
            self._transport.send(policy, version)
        policy.release()

    def evaluate(self, step: int) -> dict[str, float]:
        """See `Evaluation.run`."""
        return self._layout.on_rank_zero(lambda: self._rank_zero.evaluation.run(step))

    def lacks_evaluation(self) -> bool:
        """Whether the latest step was logged without an evaluation."""
        return self._layout.on_rank_zero(lambda: self._rank_zero.evaluation.lacks(self._report.latest))

    @property
    def _rank_zero(self) -> Services:
        assert self._services is not None  # asked for in actions of rank zero only
        return self._services
