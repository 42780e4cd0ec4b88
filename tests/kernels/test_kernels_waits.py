"""What the chunk loop of the streaming head launches, and which tiles of rows it leaves out.

How often the host waits: tests/rehearsal/test_waits.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ctpo_kernels import fused_linear_ctpo
from ctpo_kernels.tiles import TILE
from tests.kernels.heads import Head, Watch, random_head
from tests.kernels.packings import boundaries, same_bits
from tests.kernels.test_kernels_launches import FREE


def head_of(rows: int) -> Head:
    """One sequence, all of it in the loss."""
    head = random_head(1, [rows], width=4, vocab=7, spread=0.0)
    ones = torch.ones(rows)
    head.batch = {
        "old_log_probs": None,
        "response_mask": ones,
        "advantages": ones[:1],
        "cu_seqlens": boundaries([rows]),
    }
    head.labels.clamp_(min=0)
    return head


def test_a_chunk_takes_seven_launches(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three products, statistics, merge, loss, gradient by the logits. On CUDA an eighth rounds d_hidden.

    skip_zero_tiles: a CPU looks for clipped tiles after each chunk, which a GPU does not.
    """
    from triton.runtime.interpreter import GridExecutor

    found = []
    kernels: list[object] = []
    # Only counted: what the interpreter does would be counted too.
    monkeypatch.setattr(GridExecutor, "__call__", lambda self, *_, **__: kernels.append(self))
    for chunks in (2, 5):
        kernels.clear()
        arguments = head_of(8 * chunks).arguments()
        operands = {name: arguments.pop(name).requires_grad_() for name in ("hidden", "weight")}
        with Watch() as watch:
            how = {"chunk_size": 8, "skip_zero_tiles": False}
            fused_linear_ctpo(**operands, **arguments, **how, loss_agg_mode="token-mean", batch_num_tokens=9)
        launches = [name for name in watch.names if not any(free in name for free in (*FREE, "t", "unbind"))]
        found.append((len(kernels), len(launches)))
    (few_kernels, few), (many_kernels, many) = found
    assert many_kernels - few_kernels == 3 * 4, "statistics, merge, loss, gradient"
    assert many - few == 3 * 3, "products"


def planned(advantages: list[float]) -> dict[str, Any]:
    """Three sequences of a tile each, of all of whose rows the caller knows what they are."""
    head = head_of(3 * TILE)
    head.batch |= {"advantages": torch.tensor(advantages), "cu_seqlens": boundaries([TILE] * 3)}
    arguments = head.arguments()
    return {**arguments, "hidden": arguments["hidden"].requires_grad_(), "rows": torch.arange(3 * TILE)}


def gradients(arguments: dict[str, Any], **keywords: Any) -> tuple[Tensor, ...]:
    operands = arguments["hidden"], arguments["weight"].requires_grad_()
    loss, _, _ = fused_linear_ctpo(**arguments, **keywords)
    return loss.detach(), *torch.autograd.grad(loss, operands)


def test_rows_that_the_caller_knows_change_nothing() -> None:
    arguments = planned([1.0, 0.0, -1.0])
    known = torch.ones(3 * TILE, dtype=torch.bool)
    known[TILE : 2 * TILE] = False
    for found, expected in zip(gradients(arguments, may_learn=known), gradients(arguments), strict=True):
        assert same_bits(found, expected)


def test_rows_that_cannot_be_what_the_caller_says_are_refused() -> None:
    arguments = planned([1.0, 0.0, -1.0])
    nothing = torch.zeros(3 * TILE, dtype=torch.bool)
    with pytest.raises(ValueError, match="may_learn leaves out 256 rows that may have a gradient"):
        gradients(arguments, may_learn=nothing)
    with pytest.raises(ValueError, match="may_learn leaves out 384 rows"):
        gradients(arguments, may_learn=nothing, entropy_coef=0.1)
    for wrong in (nothing[1:], nothing.long(), torch.zeros(3 * TILE, dtype=torch.bool, device="meta")):
        with pytest.raises(ValueError, match=r"may_learn must be bool \[384\] in host memory, one value .*; got torch"):
            gradients(arguments, may_learn=wrong)


def test_nan_in_a_tile_that_is_left_out_is_not_lost(backend: str) -> None:
    """Its advantage is 0, its log-ratio is not a number: a dense product would make d_weight NaN."""
    arguments = planned([0.0, 0.0, 0.0])
    arguments["old_log_probs"] = torch.zeros(3 * TILE)
    arguments["old_log_probs"][TILE + 3] = torch.nan
    loss, d_hidden, d_weight = gradients(arguments, chunk_size=2 * TILE)
    assert loss.isnan()
    rows = d_hidden.isnan().all(dim=1)
    assert rows[TILE + 3] and not rows[: TILE + 3].any() and not rows[2 * TILE :].any()
    assert d_weight.isnan().any()
