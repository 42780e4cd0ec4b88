"""When held-out prompts are answered and scored, and with what result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

from ctpo_megatron.config.schema import EvalConfig
from ctpo_megatron.data.records import Group, Prompt
from ctpo_megatron.evaluate.samples import Sample, validation_metrics
from ctpo_megatron.rollout import Cancelled, Collector, Phase, Sampling


class Evaluation:
    """Answers `prompts` with the weights published last; lives on rank zero."""

    def __init__(
        self,
        config: EvalConfig,
        collector: Collector,
        prompts: Sequence[Prompt],
        dump: Callable[[int, Sequence[Group]], None],
        phase: Phase,
        note: Callable[[str], None],
    ) -> None:
        """prompts: none where there is nothing to evaluate. dump: keeps the groups of a step for people to read.

        note: says a line on the terminal.
        """
        self._config, self._collector, self._note = config, collector, note
        self._prompts, self._dump, self._phase = prompts[: config.prompts], dump, phase

    def run(self, step: int) -> dict[str, float]:
        """`val/*` metrics; empty without prompts, or when the run was asked to end meanwhile."""
        if not self._prompts:
            return {}
        with self._phase("eval"):
            try:
                groups, _ = self._collector.collect(
                    self._prompts,
                    step=step,
                    samples=self._config.samples,
                    sampling=Sampling(self._config.temperature, self._config.top_p, 0),
                    phase=lambda _: nullcontext(),  # its parts are no phases of a training step
                )
            except Cancelled as cancelled:
                self._note(f"[eval] step {step}: MISSING, the run was asked to end meanwhile ({cancelled})")
                return {}
            self._dump(step, groups)
        left_out = len(self._prompts) - len(groups)  # quarantined: nothing may take their place here
        samples = [Sample.of(group.prompt, trajectory) for group in groups for trajectory in group.trajectories]
        return validation_metrics(samples) | ({"val/prompts_left_out": float(left_out)} if left_out else {})

    def lacks(self, record: Mapping[str, object]) -> bool:
        """Whether the metrics of a step hold no evaluation though there are prompts."""
        return bool(self._prompts) and not any(name.startswith("val/") for name in record)
