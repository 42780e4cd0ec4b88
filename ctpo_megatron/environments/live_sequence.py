"""A sequence while an episode samples it: what the engine adds, and what it has read of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ctpo_megatron.data.trajectory import Trajectory
    from ctpo_megatron.environments.episode import GenerateTurn


@dataclass(slots=True)
class LiveSequence:
    """record: its tokens. end: how many it may have. busy: a call is extending it. turn: of its last model turn."""

    record: Trajectory
    end: int
    busy: bool = False
    turn: int = 0
    computed: int = 0

    async def sample(
        self, engine: GenerateTurn, number: int, max_tokens: int, seed: int, stop: Sequence[str] = ()
    ) -> Sequence[int]:
        """Have the engine continue turn `number`; record and return the tokens. Raises what the engine raises."""
        record, start = self.record, self.computed
        ids = record.token_ids.copy()
        if stop:
            sampled = await engine(ids, max_tokens=max_tokens, seed=seed, start=start, stop=stop)
        else:
            sampled = await engine(ids, max_tokens=max_tokens, seed=seed, start=start)
        who = f"prompt {record.prompt_id!r} sample {record.sample_index}: the engine returned"
        if not 1 <= len(sampled.token_ids) <= max_tokens:
            raise RuntimeError(f"{who} {len(sampled.token_ids)} tokens, asked for 1 to {max_tokens}")
        record.append_model(sampled.token_ids, sampled.rollout_log_probs, sampled.weight_version, number, sampled.more)
        self.computed = len(record) - 1  # the model has not read the last token
        for name, values in sampled.computed.items():
            if len(values) != self.computed - start:
                read = self.computed - start
                raise RuntimeError(f"{who} {name} of {len(values)} tokens, and read {read} since the last call")
        record.fill(start, sampled.computed)
        return sampled.token_ids
