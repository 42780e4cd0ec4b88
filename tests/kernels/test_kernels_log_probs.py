"""Log-probs from logits and from hidden states: float64 reference, vocabulary shards, padding, labels, bad values."""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch
from torch import Tensor

from ctpo_kernels import rows_torch, vocab_parallel_log_probs
from ctpo_kernels.rows_torch import Shard
from tests.kernels.heads import Watch
from tests.kernels.packings import distance, same_bits
from tests.kernels.reference import log_probs_reference
from tests.support.pairwise import pairwise

LOG_PROB = 5e-6  # nats, absolute, against float64
GRADIENT = 5e-6  # Frobenius, relative

# The interpreter computes with numpy, which warns of infinities.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def rows(backend: str) -> ModuleType:
    if backend == "torch":
        return rows_torch
    from ctpo_kernels import rows_triton

    return rows_triton


def made_up(
    n: int, columns: int, vocab: int, dtype: torch.dtype = torch.float32, *, shifted: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels (one ignored), upstream gradients. Some columns are -inf; rows are shifted by 80 or -90."""
    logits = 3 * torch.randn(n, columns)
    if shifted:
        logits[1::5] += 80
        logits[2::5] -= 90
    logits[3::5, 1:4] = -math.inf
    logits[:, vocab:] = 50.0
    labels = torch.randint(4, vocab, (n,)) if vocab > 5 else torch.zeros(n, dtype=torch.int64)
    if n > 2:
        labels[-1] = -100
    return logits.to(dtype), labels, torch.randn(n)


def absolute(found: Tensor, expected: Tensor) -> float:
    assert torch.equal(found.isnan(), expected.isnan())
    return float((found.double() - expected).nan_to_num().abs().max())


@pairwise(
    {
        "backend": ["torch", "triton"],
        "n": [1, 23],
        "columns, vocab": [(1, 1), (17, 16), (37, 37), (131, 100), (200, 199)],
        "temperature": [1.0, 0.7, 1.3],
    },
    indirect=["backend"],
)
def test_given_logits(backend: str, n: int, columns: int, vocab: int, temperature: float) -> None:
    logits, labels, g = made_up(n, columns, vocab, shifted=temperature == 1)
    given = logits.clone().requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs(given, labels, None, temperature, True, vocab_size=vocab)
    log_probs.backward(g)
    expected = log_probs_reference(logits, labels, temperature, vocab, g)
    assert log_probs.dtype == torch.float32
    assert absolute(log_probs.detach(), expected.log_probs) <= LOG_PROB
    assert absolute(entropy, expected.entropy) <= LOG_PROB
    assert distance(given.grad, expected.d_logits) <= GRADIENT
    assert not given.grad[:, vocab:].any()
    assert entropy.requires_grad
    assert torch.equal(given.detach(), logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_computed_in_float32(backend: str, dtype: torch.dtype) -> None:
    logits, labels, g = made_up(20, 40, 33)
    given = logits.clamp(-60000, 60000).to(dtype).requires_grad_()
    log_probs = vocab_parallel_log_probs(given, labels, vocab_size=33)
    log_probs.backward(g)
    expected = log_probs_reference(given.detach().double(), labels, 1.0, 33, g)
    assert log_probs.dtype == torch.float32
    assert absolute(log_probs.detach(), expected.log_probs) <= LOG_PROB
    exact = expected.d_logits
    assert given.grad.dtype == dtype
    # The interpreter cuts bfloat16 off where a device rounds: one unit in the last place instead of half a one.
    units = 1.0 if backend == "triton" else 0.5
    error = (given.grad.double() - exact).abs()
    assert (error <= 1.01 * units * exact.abs() * torch.finfo(dtype).eps + 1e-7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_in_place_of_the_logits(backend: str, dtype: torch.dtype) -> None:
    logits, labels, g = made_up(20, 40, 33, dtype)
    apart = logits.clone().requires_grad_()
    vocab_parallel_log_probs(apart, labels, vocab_size=33).backward(g)
    leaf = logits.clone().requires_grad_()
    inside = leaf * 1.0
    log_probs = vocab_parallel_log_probs(inside, labels, vocab_size=33, inplace_backward=True)
    memory = inside.detach()
    log_probs.backward(g)
    assert same_bits(leaf.grad, apart.grad)
    assert same_bits(memory, apart.grad)


def test_second_backward_in_place_of_the_logits_is_refused(backend: str) -> None:
    """The first one has overwritten what the second would read."""
    logits, labels, g = made_up(6, 20, 20)
    inside = logits.requires_grad_() * 1.0
    log_probs = vocab_parallel_log_probs(inside, labels, inplace_backward=True)
    log_probs.backward(g, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        log_probs.backward(g)


@pairwise(
    {
        "backend": ["torch", "triton"],
        "shards": [1, 2, 4],
        "columns, vocab": [(40, 37), (40, 40), (60, 17)],
        "temperature": [1.0, 0.7],
    },
    indirect=["backend"],
)
def test_shards_merge_to_the_whole(backend: str, shards: int, columns: int, vocab: int, temperature: float) -> None:
    """Statistics of each shard, merged in rank order; at vocab 17 the last of four shards is padding only."""
    code = rows(backend)
    logits, labels, g = made_up(15, columns, vocab, shifted=temperature == 1)
    expected = log_probs_reference(logits, labels, temperature, vocab, g)
    size = columns // shards
    own = [Shard(r * size, max(0, min(size, vocab - r * size))) for r in range(shards)]
    cuts = [logits[:, r * size : (r + 1) * size] for r in range(shards)]
    parts = torch.stack(
        [code.row_stats(x.clone(), labels, s, temperature, entropy=True) for x, s in zip(cuts, own, strict=True)]
    )
    merged = code.merge_stats(parts, labels, temperature)
    assert absolute(merged.log_probs, expected.log_probs) <= LOG_PROB
    assert absolute(merged.entropy, expected.entropy) <= LOG_PROB
    upstream = torch.where(labels == -100, 0.0, g)
    found = []
    for x, s in zip(cuts, own, strict=True):
        out = torch.empty_like(x)
        if backend == "torch":
            out = rows_torch.gradient(x.clone(), merged.lse, labels, upstream, s, temperature)
        else:
            code.gradient_into(out, x.contiguous(), merged.lse, labels, upstream, s, temperature)
        found.append(out)
    assert distance(torch.cat(found, dim=1), expected.d_logits) <= GRADIENT
    if backend == "torch":
        again = cuts[0].clone()
        left = rows_torch.row_stats(again, labels, own[0], temperature, entropy=False)
        direct = rows_torch.gradient_after_stats(again, left, merged, labels, upstream, own[0], temperature)
        assert distance(direct, expected.d_logits[:, :size]) <= GRADIENT


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_twin_adds_at_labels_without_an_addition_of_undefined_order(dtype: torch.dtype) -> None:
    """`scatter_add_` adds atomically on CUDA unless torch is told otherwise. The bits are the same."""
    rows, labels, g = torch.randn(7, 40, dtype=dtype), torch.tensor([3, 0, 39, -100, 37, 20, 3]), torch.randn(7)
    shard = Shard(0, 37)
    owned = (labels >= 0) & (labels < 37)
    column = labels.where(owned, 0)[:, None]
    expected = rows.scatter_add(1, column, torch.where(owned, g, 0.0)[:, None].to(dtype))
    with Watch() as watch:
        found = rows_torch._add_at_labels(rows, labels, g, shard)
    assert found.data_ptr() == rows.data_ptr()
    assert same_bits(found, expected)
    assert set(watch.names).isdisjoint({"scatter_add_", "scatter_add", "index_add_", "put_", "scatter_reduce_"})


def test_shard_of_minus_infinity(backend: str) -> None:
    """The model gives a whole shard no probability: no inf - inf anywhere."""
    code = rows(backend)
    logits, labels, _ = made_up(6, 40, 40)
    logits[:, 20:] = -math.inf
    labels[:] = torch.arange(6)
    shards = [Shard(0, 20), Shard(20, 20)]
    parts = [code.row_stats(logits[:, s.start : s.start + 20].clone(), labels, s, 1.0, entropy=True) for s in shards]
    merged = code.merge_stats(torch.stack(parts), labels, 1.0)
    expected = log_probs_reference(logits, labels)
    assert absolute(merged.log_probs, expected.log_probs) <= LOG_PROB
    assert absolute(merged.entropy, expected.entropy) <= LOG_PROB


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_logit_shows_in_its_row(backend: str, bad: float) -> None:
    logits, labels, g = made_up(8, 30, 25)
    clean = logits.clone().requires_grad_()
    vocab_parallel_log_probs(clean, labels, vocab_size=25).backward(g)
    logits[4, 7] = bad
    logits[2, 27] = bad  # padding
    given = logits.clone().requires_grad_()
    log_probs = vocab_parallel_log_probs(given, labels, vocab_size=25)
    log_probs.backward(g)
    assert log_probs.isnan().nonzero().tolist() == [[4]]
    others = [0, 1, 2, 3, 5, 6, 7]
    assert given.grad[4].isnan().any()
    assert torch.equal(given.grad[others], clean.grad[others])


def test_upstream_of_zero_leaves_zero(backend: str) -> None:
    logits, labels, g = made_up(10, 30, 30)
    g[::2] = 0.0
    given = logits.requires_grad_()
    vocab_parallel_log_probs(given, labels).backward(g)
    assert not given.grad[::2].any()
    assert given.grad[1::2].any(dim=1)[:4].all()


def test_no_rows(backend: str) -> None:
    logits = torch.zeros(0, 8, requires_grad=True)
    log_probs = vocab_parallel_log_probs(logits, torch.zeros(0, dtype=torch.int64))
    log_probs.sum().backward()
    assert log_probs.shape == (0,)
    assert logits.grad.shape == (0, 8)


def test_company_of_other_rows_leaves_the_bits(backend: str) -> None:
    logits, labels = torch.randn(64, 40), torch.randint(0, 40, (64,))
    whole = vocab_parallel_log_probs(logits, labels)
    parts = torch.cat([vocab_parallel_log_probs(logits[i : i + 16], labels[i : i + 16]) for i in range(0, 64, 16)])
    assert same_bits(whole, parts)
    assert same_bits(vocab_parallel_log_probs(logits, labels), whole)
