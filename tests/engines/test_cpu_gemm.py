"""How many tokens an engine on a CPU multiplies where a step has so and so many."""

from __future__ import annotations

from ctpo_megatron.engines.cpu.gemm import padded_tokens


def test_few_numbers_of_tokens_and_little_padding() -> None:
    padded = {tokens: padded_tokens(tokens) for tokens in range(1, 4097)}
    assert all(0 <= more - tokens < max(8, tokens / 4) for tokens, more in padded.items())
    assert len({padded[tokens] for tokens in range(1, 257)}) == 16
    assert len(set(padded.values())) == 32
    assert all(padded_tokens(more) == more for more in padded.values())
