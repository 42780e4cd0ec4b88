"""Two processes (gloo): vocabulary shards, sequence and context parallelism give what one process gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ctpo_kernels import SUMS, linear_log_probs
from ctpo_kernels.loss_torch import merge_vectors
from tests.kernels import kernel_ranks
from tests.kernels.heads import sweep
from tests.kernels.kernel_ranks import LENGTHS, RANKS, RATIOS, TOKENS, VOCABS, case_batch, head_of, zigzag_rows
from tests.kernels.packings import distance, run, same_bits
from tests.kernels.reference import exact_log_probs
from tests.support import ranks as pool
from tests.support.backends import use_backend

CASES = [("torch", torch.float64), ("torch", torch.float32), ("triton", torch.float32)]
COUNTS = [i for i, name in enumerate(SUMS) if name not in ("loss", "ratio_excess", "ratio_excess_squared")]
cases = pytest.mark.parametrize(("backend", "dtype"), CASES)


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    """What each rank found, from one job for all tests."""
    return pool.run(kernel_ranks.main, ranks=RANKS)


def of_ranks(ranks: list[dict[Any, Any]], backend: str, dtype: torch.dtype, case: Any) -> list[dict[str, Tensor]]:
    if (backend, dtype) not in ranks[0]:
        pytest.skip("triton is not installed, or compiles for a GPU")
    return [found[backend, dtype][case] for found in ranks]


def tolerance(dtype: torch.dtype) -> float:
    return 1e-12 if dtype == torch.float64 else 5e-6


def joined(found: list[dict[str, Tensor]], name: str) -> Tensor:
    return torch.cat([each[name] for each in found])


def in_order(found: list[dict[str, Tensor]], name: str) -> Tensor:
    """Tokens of context-parallel ranks at their places in the whole batch."""
    values = joined(found, name)
    out = torch.empty_like(values)
    out[torch.cat([zigzag_rows(rank) for rank in range(RANKS)])] = values
    return out


def assert_head(found: list[dict[str, Tensor]], dtype: torch.dtype, name: str) -> None:
    with use_backend("torch"):
        expected = sweep(head_of(name, dtype), chunk_size=16)
    for each in found:
        assert same_bits(each["log_probs"], found[0]["log_probs"])
        assert same_bits(each["loss"], found[0]["loss"])
        assert same_bits(each["stats"], found[0]["stats"])
    assert float((found[0]["log_probs"] - expected.log_probs).abs().max()) <= tolerance(dtype)
    assert distance(joined(found, "d_weight"), expected.d_weight.double()) <= tolerance(dtype)
    torch.testing.assert_close(found[0]["loss"], expected.loss, rtol=1e-5, atol=1e-6)
    vocab, _ = VOCABS[name]
    assert not joined(found, "d_weight")[vocab:].any()


@cases
@pytest.mark.parametrize("name", VOCABS)
def test_tensor_parallel_head(ranks: list, backend: str, dtype: torch.dtype, name: str) -> None:
    found = of_ranks(ranks, backend, dtype, ("head", name))
    assert_head(found, dtype, name)
    expected = sweep(head_of(name, dtype), chunk_size=16)
    for each in found:
        assert same_bits(each["d_hidden"], found[0]["d_hidden"])
        assert distance(each["d_hidden"], expected.d_hidden.double()) <= tolerance(dtype)


@cases
def test_sequence_parallel_head(ranks: list, backend: str, dtype: torch.dtype) -> None:
    name = next(iter(VOCABS))
    found = of_ranks(ranks, backend, dtype, "sequence parallel")
    assert_head(found, dtype, name)
    plain = of_ranks(ranks, backend, dtype, ("head", name))
    assert same_bits(found[0]["log_probs"], plain[0]["log_probs"])
    assert same_bits(joined(found, "d_weight"), joined(plain, "d_weight"))
    assert distance(joined(found, "d_hidden"), plain[0]["d_hidden"].double()) <= tolerance(dtype)


@cases
def test_main_grad_of_the_shards(ranks: list, backend: str, dtype: torch.dtype) -> None:
    found = of_ranks(ranks, backend, dtype, "main grad")
    expected = sweep(head_of(next(iter(VOCABS)), dtype))
    # main_grad is float32 whatever the operands are.
    assert distance(joined(found, "d_weight"), expected.d_weight.double()) <= 5e-6
    assert joined(found, "d_weight").dtype == torch.float32


@cases
@pytest.mark.parametrize("name", VOCABS)
def test_log_probs_over_shards(ranks: list, backend: str, dtype: torch.dtype, name: str) -> None:
    found = of_ranks(ranks, backend, dtype, ("log probs", name))
    head = head_of(name, dtype)
    hidden, weight = head.hidden.clone().requires_grad_(), head.weight.clone().requires_grad_()
    logits = hidden @ weight.T
    logits.retain_grad()
    labels = head.labels.clamp(min=0)
    log_probs, entropy = exact_log_probs(logits, labels, head.temperature, head.vocab_size)
    g = torch.sin(torch.arange(hidden.shape[0], dtype=dtype))
    torch.autograd.backward((log_probs, entropy), (g, g.flip(0)))
    entropy = entropy.detach()
    for each in found:
        for field in ("log_probs", "given"):
            assert same_bits(each[field], found[0][field])
            assert float((each[field] - log_probs.detach()).abs().max()) <= tolerance(dtype)
        for field in ("entropy", "given_entropy"):
            assert float((each[field] - entropy).abs().max()) <= tolerance(dtype)
        assert distance(each["d_hidden"], hidden.grad.double()) <= tolerance(dtype)
    assert distance(joined(found, "d_weight"), weight.grad.double()) <= tolerance(dtype)
    d_logits = torch.cat([each["d_logits"] for each in found], dim=1)
    assert distance(d_logits, logits.grad.double()) <= tolerance(dtype)
    assert not d_logits[:, head.vocab_size :].any()


@cases
def test_sequence_parallel_log_probs(ranks: list, backend: str, dtype: torch.dtype) -> None:
    found = of_ranks(ranks, backend, dtype, "sequence parallel log probs")
    plain = of_ranks(ranks, backend, dtype, ("log probs", next(iter(VOCABS))))
    assert same_bits(found[0]["log_probs"], plain[0]["log_probs"])
    assert same_bits(joined(found, "d_weight"), joined(plain, "d_weight"))
    assert distance(joined(found, "d_hidden"), plain[0]["d_hidden"].double()) <= tolerance(dtype)


@cases
@pytest.mark.parametrize("case", [*RATIOS, "token-mean"])
def test_context_parallel_loss(ranks: list, backend: str, dtype: torch.dtype, case: str) -> None:
    """S_t and decisions to the bit; loss and statistics are shares that add up."""
    found = of_ranks(ranks, backend, dtype, ("context parallel", case))
    keywords: dict[str, Any] = {"ratio_mode": case}
    if case == "token-mean":
        keywords = {"loss_agg_mode": case, "batch_num_tokens": TOKENS, "clip_power": 0.3}
    expected = run(case_batch(dtype), **keywords)
    assert same_bits(in_order(found, "prefix"), expected.per_token.prefix)
    assert same_bits(in_order(found, "clip"), expected.per_token.clip)
    assert same_bits(in_order(found, "log_ratio"), expected.per_token.log_ratio)
    assert distance(in_order(found, "gradient"), expected.gradient.double()) <= tolerance(dtype)
    whole = torch.cat([expected.stats.sums, expected.stats.maxima])
    merged = merge_vectors(found[0]["stats"], found[1]["stats"])
    assert same_bits(merged[COUNTS], whole[COUNTS])
    torch.testing.assert_close(merged, whole, rtol=1e-5, atol=1e-6)
    total = found[0]["loss"] + found[1]["loss"]
    torch.testing.assert_close(total, expected.loss, rtol=1e-5, atol=1e-6)


@cases
@pytest.mark.parametrize("ratio", ["cumprod", "sequence-geomean"])
def test_context_parallel_head(ranks: list, backend: str, dtype: torch.dtype, ratio: str) -> None:
    found = of_ranks(ranks, backend, dtype, ("context parallel head", ratio))
    expected = sweep(head_of(next(iter(VOCABS)), dtype), ratio_mode=ratio)
    assert float((in_order(found, "log_probs") - expected.log_probs).abs().max()) <= tolerance(dtype)
    assert distance(in_order(found, "d_hidden"), expected.d_hidden.double()) <= tolerance(dtype)
    total = found[0]["d_weight"] + found[1]["d_weight"]
    assert distance(total, expected.d_weight.double()) <= tolerance(dtype)
    assert same_bits((found[0]["stats"] + found[1]["stats"])[1:3], expected.stats.sums[1:3])


def test_group_mistakes_are_refused_on_every_rank(ranks: list) -> None:
    for each in of_ranks(ranks, "torch", torch.float32, "refusals"):
        assert len(each) == 2
        assert "batch_num_tokens: with cp_group, token-mean" in each[0]
        assert "cp_group: a rank holds two equal pieces" in each[1]


def test_log_probs_of_one_process_are_those_of_two() -> None:
    """A group of one makes no collective: it must not even look at the process group."""

    class Alone:
        def size(self) -> int:
            return 1

    head = head_of(next(iter(VOCABS)), torch.float32)
    labels = head.labels.clamp(min=0)
    alone = linear_log_probs(head.hidden, head.weight, labels, Alone(), True, vocab_size=head.vocab_size)
    assert same_bits(alone, linear_log_probs(head.hidden, head.weight, labels, vocab_size=head.vocab_size))
    assert sum(LENGTHS) == alone.numel()
