"""Delivers the outputs of a request once it has finished, not after every step.

After every step vLLM's frontend processes the outputs of all requests, one by one. A request that returns its final
output only needs none of them earlier.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsLists

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest


_MOST_PARTS = 64
"""Outputs of a request before they are merged: one for each of thousands of tokens takes ten times the memory."""


class Gathered:
    """Outputs that are held back, by request; for one thread.

    All of them are delivered when the weights change: vLLM labels tokens with the version of the outputs they are in.
    """

    def __init__(self) -> None:
        self._held: dict[str, list[EngineCoreOutput]] = {}
        self._version: str | None = None

    def expect(self, request: EngineCoreRequest) -> None:
        """Register a new request. Outputs are held back unless partial ones are read, or stop strings need the text."""
        params = request.sampling_params
        if params is not None and params.output_kind == RequestOutputKind.FINAL_ONLY and not params.detokenize:
            self._held[request.request_id] = []

    def keep_only(self, requests: Collection[str]) -> None:
        """Drop the outputs of all other requests, which were aborted."""
        for request_id in self._held.keys() - requests:
            del self._held[request_id]

    def take(self, outputs: EngineCoreOutputs) -> list[EngineCoreOutputs]:
        """Take the outputs of a step. Returns what to deliver now, in this order."""
        ready = []
        if outputs.weight_version != self._version:
            if earlier := [_together(held) for held in self._held.values() if held]:
                ready.append(EngineCoreOutputs(outputs=earlier, weight_version=self._version))
            for held in self._held.values():
                held.clear()
            self._version = outputs.weight_version
        complete = []
        for output in outputs.outputs:
            if (whole := self._whole(output)) is not None:
                complete.append(whole)
        outputs.outputs = complete
        if complete or outputs.scheduler_stats is not None:
            ready.append(outputs)
        return ready

    def _whole(self, output: EngineCoreOutput) -> EngineCoreOutput | None:
        held = self._held.get(output.request_id)
        if held is None:
            return output
        held.append(output)
        if output.finish_reason is not None:
            return _together(self._held.pop(output.request_id))
        if len(held) == _MOST_PARTS:
            held[:] = [_together(held)]
        return None


def _together(parts: list[EngineCoreOutput]) -> EngineCoreOutput:
    """Merge outputs: tokens of all, prefill statistics of the first, finish reason of the last."""
    first, last = parts[0], parts[-1]
    if len(parts) > 1:
        log_probs = [part.new_logprobs for part in parts if part.new_logprobs is not None]
        last.new_token_ids = [token for part in parts for token in part.new_token_ids]
        last.new_logprobs = _rows(log_probs) if log_probs else None
        last.prefill_stats = first.prefill_stats
        last.new_prompt_logprobs_tensors = first.new_prompt_logprobs_tensors
        last.prompt_token_id_logprobs = first.prompt_token_id_logprobs
    return last


def _rows(parts: list[LogprobsLists]) -> LogprobsLists:
    token_ids, log_probs, ranks, _ = zip(*parts, strict=True)
    return LogprobsLists(np.concatenate(token_ids), np.concatenate(log_probs), np.concatenate(ranks))


def take_log_probs_of_many_tokens() -> None:
    """Patch vLLM in this process: its frontend appends the log-probs of an output at once, not token by token.

    For requests that want the log-prob of the sampled token alone, as flat lists; others are left to vLLM.
    """
    original: Any = LogprobsProcessor._update_sample_logprobs

    def update(self: LogprobsProcessor, lists: LogprobsLists) -> None:
        flat = self.logprobs
        if self.num_logprobs != 0 or self.tokenizer is not None or not isinstance(flat, FlatLogprobs):
            original(self, lists)
            return
        log_probs = lists.logprobs[:, 0].tolist()
        start = len(flat.logprobs)
        flat.start_indices.extend(range(start, start + len(log_probs)))
        flat.end_indices.extend(range(start + 1, start + len(log_probs) + 1))
        flat.token_ids.extend(lists.logprob_token_ids[:, 0].tolist())
        flat.logprobs.extend(log_probs)
        flat.ranks.extend(lists.sampled_token_ranks.tolist())
        flat.decoded_tokens.extend([None] * len(log_probs))
        self.cumulative_logprob = (self.cumulative_logprob or 0.0) + sum(log_probs)

    LogprobsProcessor._update_sample_logprobs = update
