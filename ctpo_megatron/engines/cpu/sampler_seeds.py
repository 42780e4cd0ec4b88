"""Draws the seeds of vLLM's CPU sampler for many tokens of a request at once.

For every token of a request with a seed vLLM draws one number from the generator of the request. That takes 7 us (AMD
EPYC), as much as the rest of the sampler needs for the token. The numbers, and so the tokens, stay the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch

_AHEAD = 32
_RANGE = 1 << 31


class Draws:
    """What generators would draw one by one, in the same order. No other code may draw from them."""

    def __init__(self) -> None:
        self._left: WeakKeyDictionary[torch.Generator, list[int]] = WeakKeyDictionary()

    def next(self, generators: Iterable[torch.Generator]) -> list[int]:
        """A number below 2^31 of each."""
        numbers = []
        for generator in generators:
            numbers.append(self._next(generator))
        return numbers

    def _next(self, generator: torch.Generator) -> int:
        left = self._left.get(generator)
        if not left:
            numbers = torch.randint(0, _RANGE, (_AHEAD,), generator=generator, dtype=torch.long)
            left = self._left[generator] = numbers.flip(0).tolist()  # `pop` takes the last one
        return left.pop()


def draw_ahead() -> None:
    """Patch vLLM in this process: its CPU sampler takes the seeds from `Draws`."""
    from vllm.v1.sample.ops import topk_topp_sampler
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    original: Any = TopKTopPSampler.forward_cpu
    draws = Draws()

    def forward_cpu(
        self: TopKTopPSampler,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.use_fp64_gumbel or self.logprobs_mode != "processed_logprobs":
            found: tuple[torch.Tensor, torch.Tensor | None] = original(self, logits, generators, k, p)
            return found
        logits = topk_topp_sampler.apply_top_k_top_p(logits, k, p)
        seeds = torch.randint(0, _RANGE, (len(logits),), dtype=torch.long)  # of requests without a seed, as in vLLM
        if generators:
            seeds[list(generators)] = torch.tensor(draws.next(generators.values()))
        tokens = torch.ops._C.fused_gumbel_argmax(logits.float(), seeds)
        return tokens, logits.log_softmax(dim=-1, dtype=torch.float32)

    TopKTopPSampler.forward_cpu = forward_cpu
