"""Of the streaming head on pretended GPUs: how often it waits for them, and how many rows it takes at a time."""

from __future__ import annotations

from typing import Any

import torch

from ctpo_kernels import fused_linear_ctpo
from ctpo_kernels.tiles import TILE
from tests.rehearsal import synchronizations

ROWS, CHUNKS = 3 * TILE + 5, 4
SEQUENCES = 3

# Waits of one call. Without `rows` the rows of the response are searched for.
EXPECTED = {
    "nothing known": 2,
    "rows known": 1,
    "rows and tiles known": 0,
    "all rows multiplied": 0,
    "ratio of the sequence": 1,
    "ratio of the sequence, tiles known": 0,
    "entropy": 1,
    "token-mean, uncounted": 0,
    "a power without a formula": 0,
}
_KEYWORDS: dict[str, dict[str, Any]] = {
    "all rows multiplied": {"skip_zero_tiles": False},
    "ratio of the sequence": {"ratio_mode": "sequence"},
    "ratio of the sequence, tiles known": {"ratio_mode": "sequence"},
    "entropy": {"entropy_coef": 0.1},
    "token-mean, uncounted": {"loss_agg_mode": "token-mean"},
    "a power without a formula": {"clip_power": 0.3},
}


def counts() -> dict[str, int]:
    """Waits of one call of `fused_linear_ctpo` over four chunks, for each of EXPECTED."""
    return {name: _count(name) for name in EXPECTED}


def _count(name: str) -> int:
    g = torch.Generator().manual_seed(0)
    response = torch.arange(2 * ROWS) % 2 == 0
    place = response.nonzero().squeeze(1)
    cu_seqlens = torch.tensor([0, 200, 300, 2 * ROWS])
    tensors = {
        "hidden": torch.randn(2 * ROWS, 8, generator=g),
        "weight": torch.randn(11, 8, generator=g),
        "labels": torch.randint(11, (2 * ROWS,), generator=g),
        "old_log_probs": torch.full((2 * ROWS,), -2.0),
        "response_mask": response,
        "advantages": torch.tensor([1.0, 0.0, -1.0]),
        "cu_seqlens": cu_seqlens,
        "rows": None if name == "nothing known" else place,
    }
    given: dict[str, Any] = {
        key: None if t is None else t.pin_memory().to("cuda", non_blocking=True) for key, t in tensors.items()
    }
    given["hidden"].requires_grad_()
    given["weight"].requires_grad_()
    if name.endswith("tiles known") or name in ("token-mean, uncounted", "a power without a formula"):
        given["may_learn"] = (place < 200) | (place >= 300)
    synchronizations.counted()
    loss, *_ = fused_linear_ctpo(**given, **_KEYWORDS.get(name, {}), chunk_size=TILE)
    loss.backward()
    found = synchronizations.counted()
    assert torch.isfinite(given["weight"].grad).all()
    return found.total()


def chunk_of_unequal_gpus() -> tuple[int | None, int]:
    """Rows at a time of a published model, where every rank has half the memory of the rank before it; its own size."""
    from ctpo_megatron.config import PolicyConfig
    from ctpo_megatron.policy import destroy_distributed, init_distributed, model
    from docs.site.sizing import MODELS
    from tests.rehearsal.torch_cuda import Properties

    config = PolicyConfig(timeout_minutes=2.0, dtype="bfloat16", recompute="full", use_distributed_optimizer=True)
    layout = init_distributed(config, seed=0)
    try:
        Properties.total_memory >>= layout.rank
        return model._head_chunk(MODELS["Qwen3-4B"], config), Properties.total_memory
    finally:
        destroy_distributed()
