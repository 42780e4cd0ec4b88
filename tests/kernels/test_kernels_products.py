"""Which rows the matrix products of the streaming head see, and how much memory it takes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ctpo_kernels import linear_log_probs
from ctpo_kernels.linear_head import HeadOptions, LinearHead
from ctpo_kernels.tiles import TILE
from tests.kernels.heads import Head, Watch, eager, random_head, sweep, watched
from tests.kernels.packings import boundaries, same_bits
from tests.support.backends import use_backend

VOCAB, WIDTH = 40, 6


@pytest.fixture(autouse=True)
def _twin():
    with use_backend("torch"):
        yield


def tiled(lengths: list[int], advantages: list[float], *, dtype: torch.dtype = torch.float32) -> Head:
    """Every token a response in the loss; sequences with advantage 0 have no gradient."""
    n = sum(lengths)
    head = random_head(1, [n], vocab=VOCAB, width=WIDTH, dtype=dtype, spread=0.0)
    g = torch.Generator().manual_seed(2)
    head.labels = torch.randint(0, VOCAB, (n,), generator=g)
    head.batch = {
        "old_log_probs": None,
        "response_mask": torch.ones(n),
        "advantages": torch.tensor(advantages),
        "cu_seqlens": boundaries(lengths),
    }
    return head


def rows_of(head: Head, **keywords) -> tuple[int, int, int]:
    """Rows in the products for logits, d_hidden and d_weight."""
    products = watched(lambda: sweep(head, **keywords)).products
    logits = sum(m for m, n, k in products if (n, k) == (VOCAB, WIDTH))
    d_hidden = sum(m for m, n, k in products if (n, k) == (WIDTH, VOCAB))
    d_weight = sum(k for m, n, k in products if (m, n) == (VOCAB, WIDTH))
    assert len(products) > 0
    return logits, d_hidden, d_weight


def test_masked_rows_leave_all_three_products() -> None:
    head = random_head(3, [40, 31, 29], vocab=VOCAB, width=WIDTH)
    kept = int(head.batch["response_mask"].sum())
    assert 0 < kept < 100
    assert rows_of(head, skip_zero_tiles=False, chunk_size=16) == (kept, kept, kept)


def test_no_response_means_no_product() -> None:
    head = tiled([50], [1.0])
    head.batch["response_mask"] = torch.zeros(50)
    assert not watched(lambda: sweep(head)).products


@pytest.mark.parametrize("chunk", [None, 256, 200])
def test_tiles_without_gradient_leave_two_products(chunk: int | None) -> None:
    """Advantage 0 over the tokens 128..384: two whole tiles where chunks begin at multiples of a tile."""
    head = tiled([TILE, 2 * TILE, 70], [1.0, 0.0, -1.0])
    rows = 3 * TILE + 70
    # Chunks of 200 begin off the tiles of the whole: 128..256 of each chunk counts, [328, 400) stays with its tail.
    skipped = {None: 2 * TILE, 256: 2 * TILE, 200: (200 - TILE) + TILE}[chunk]
    assert rows_of(head, chunk_size=chunk) == (rows, rows - skipped, rows - skipped)
    assert rows_of(head, chunk_size=chunk, skip_zero_tiles=False) == (rows, rows, rows)


@pytest.mark.parametrize("ratio", ["cumprod", "sequence"])
@pytest.mark.parametrize("into_main_grad", [False, True])
def test_skipping_changes_nothing(ratio: str, into_main_grad: bool) -> None:
    head = tiled([TILE, 2 * TILE, 70], [1.0, 0.0, -1.0])
    options = {"accumulate_into_main_grad": into_main_grad, "ratio_mode": ratio}
    found, expected = (sweep(head, skip_zero_tiles=skip, **options) for skip in (True, False))
    for name in ("loss", "log_probs", "d_hidden"):
        assert same_bits(getattr(found, name), getattr(expected, name))
    # Rows of d_hidden are products of their own; d_weight is summed over rows in another order.
    torch.testing.assert_close(found.d_weight, expected.d_weight, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found.stats.sums, expected.stats.sums, rtol=1e-5, atol=1e-7)


def test_zero_tiles_of_the_weight_gradient_are_bitwise_nothing() -> None:
    """Integers in the operands make sums exact: skipped or not, the same bits."""
    head = tiled([TILE, TILE], [0.0, 0.0])
    found = sweep(head)
    assert not found.d_weight.any()
    assert not found.d_hidden.any()
    assert rows_of(head) == (2 * TILE, 0, 0)


def clipped() -> Head:
    """The clip is sticky: behind a token far outside, whole tiles have no gradient."""
    head = tiled([4 * TILE], [1.0])
    old = eager(head).log_probs
    old[TILE - 1] -= 15.0
    head.batch["old_log_probs"] = old
    return head


def test_clipped_tiles_are_skipped() -> None:
    """On a CPU. On a GPU the host would wait for each chunk: tests/rehearsal/test_waits.py."""
    rows = 4 * TILE
    assert rows_of(clipped()) == (rows, TILE, TILE)
    assert rows_of(clipped(), skip_zero_tiles=False) == (rows, rows, rows)


def test_clipped_tiles_of_two_phases_are_known_before_the_second() -> None:
    """The first of four sequences is outside; where it is a chunk, its logits are not computed again either."""
    head = clipped()
    head.batch |= {"advantages": torch.ones(4), "cu_seqlens": boundaries([TILE] * 4)}
    assert rows_of(head, ratio_mode="sequence", chunk_size=2 * TILE) == (8 * TILE, 3 * TILE, 3 * TILE)
    assert rows_of(head, ratio_mode="sequence", chunk_size=TILE) == (7 * TILE, 3 * TILE, 3 * TILE)


def test_nan_gradient_is_not_skipped() -> None:
    head = tiled([TILE, TILE], [0.0, 0.0])
    old = eager(head).log_probs
    old[TILE + 3] = torch.nan
    head.batch["old_log_probs"] = old
    found = sweep(head)
    assert found.d_hidden[TILE + 3].isnan().all()
    assert found.d_weight.isnan().any()


@pytest.mark.parametrize("ratio", ["cumprod", "sequence"])
def test_no_tensor_of_all_logits_exists(ratio: str) -> None:
    n, vocab = 320, 500
    head = random_head(5, [200, 120], vocab=vocab, width=WIDTH)
    chunk = 32
    streaming = watched(lambda: sweep(head, chunk_size=chunk, ratio_mode=ratio)).largest
    assert streaming <= max(chunk * vocab, vocab * WIDTH, n * WIDTH)
    assert watched(lambda: eager(head, ratio_mode=ratio)).largest >= n * vocab
    hidden, weight = head.hidden.clone().requires_grad_(), head.weight.clone().requires_grad_()
    labels = head.labels.clamp(min=0)
    alone = watched(lambda: linear_log_probs(hidden, weight, labels, chunk_size=chunk).sum().backward()).largest
    assert alone <= max(chunk * vocab, vocab * WIDTH, n * WIDTH)


def test_memory_that_is_free_changes_no_bits_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anchor pass and training must cut alike, so the default looks at shapes alone."""
    for place in (torch.cuda, torch.cuda.memory):
        monkeypatch.setattr(place, "mem_get_info", lambda *_: pytest.fail("the free memory was asked for"))
    head = LinearHead(
        torch.zeros(9000, 4, device="meta"),
        torch.zeros(151936, 4, device="meta"),
        torch.zeros(9000, dtype=torch.int64),
        HeadOptions(None, 1.0, vocab_size=None, chunk_size=None, product_dtype=torch.float32),
    )
    assert head.chunk_size == 2048


def test_one_sweep_multiplies_each_row_once_and_two_phases_twice() -> None:
    head = tiled([100], [1.0])
    assert rows_of(head, chunk_size=32) == (100, 100, 100)
    assert rows_of(head, chunk_size=32, ratio_mode="sequence") == (200, 100, 100)


def test_log_probs_of_a_chunk_are_copied_once() -> None:
    with Watch() as watch:
        found = sweep(tiled([100], [1.0]), chunk_size=32)
    assert watch.copies_into[found.log_probs.untyped_storage().data_ptr()] == 4


class _Wide(TorchDispatchMode):
    """Multiplies 16-bit operands into float32, which torch has on CUDA only; counts these products and all others."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket is torch.ops.aten.mm:
            self.seen["wide" if torch.float32 in args or args[0].dtype == torch.float32 else "narrow"] += 1
        if function is torch.ops.aten.mm.dtype:
            return args[0].float() @ args[1].float()
        return function(*args, **(kwargs or {}))


def test_low_precision_products_of_a_gpu_add_up_in_float32() -> None:
    """The branch of a GPU, chosen by hand: written in bfloat16, a split product would add its parts in bfloat16."""
    rows = 2 * TILE
    hidden, dz = (torch.randn(rows, n).bfloat16() for n in (WIDTH, VOCAB))
    weight, labels = torch.randn(VOCAB, WIDTH).bfloat16(), torch.zeros(rows, dtype=torch.int64)
    options = HeadOptions(None, 1.0, vocab_size=None, chunk_size=rows, product_dtype=torch.bfloat16)
    head = LinearHead(hidden, weight, labels, options)
    head._mixed, head._operand, d_hidden = True, weight, torch.zeros_like(hidden)
    with _Wide() as products:
        head.accumulate(dz, 0, d_hidden, None, [(0, rows)])
    assert products.seen == {"wide": 1}
    assert same_bits(d_hidden, (dz.float() @ weight.float()).bfloat16())
