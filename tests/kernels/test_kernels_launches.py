"""How much a call of the loss asks of the device: launches, nothing beside them, bytes. Where launches go."""

from __future__ import annotations

import ast
import weakref
from pathlib import Path

import pytest
import torch

import ctpo_kernels as ck
from tests.kernels.heads import Watch
from tests.support.pairwise import pairwise

# What prepares memory or looks at it differently; all others would be launches on a device.
FREE = ("empty", "detach", "view", "slice", "select", "unsqueeze", "alias", "set_", "as_strided")
# Checks that are only made where the boundaries lie on the CPU.
CHECKS = ("_to_copy", "_local_scalar_dense", "sub", "lt", "any")


@pairwise(
    {
        "segments": [3, 300],
        "mask": [torch.bool, torch.uint8, torch.int64],
        "boundaries": [torch.int32, torch.int64],
        "mode": ["seq-mean-token-mean", "token-mean"],
    }
)
def test_three_launches_or_four_and_nothing_else(
    interpreter: None,
    monkeypatch: pytest.MonkeyPatch,
    segments: int,
    mask: torch.dtype,
    boundaries: torch.dtype,
    mode: str,
) -> None:
    """The fourth counts the loss tokens of token-mean, where they are not given."""
    from triton.runtime.interpreter import GridExecutor

    launches: list[object] = []
    monkeypatch.setattr(GridExecutor, "__call__", lambda self, *_, **__: launches.append(self))
    n = 2 * segments
    log_probs = torch.zeros(n, requires_grad=True)
    response = torch.ones(n, dtype=mask)
    cu_seqlens = torch.arange(0, n + 1, 2, dtype=boundaries)
    old_log_probs, advantages = torch.zeros(n), torch.ones(segments)
    for count_given in (False, True):
        launches.clear()
        with Watch() as operations:
            tokens = (log_probs, old_log_probs, response, advantages, cu_seqlens)
            counts = {"batch_num_tokens": n} if count_given else {}
            ck.ctpo_loss(*tokens, loss_mask=response, loss_agg_mode=mode, **counts)
        assert len(launches) == (4 if mode == "token-mean" and not count_given else 3)
        extra = [name for name in operations.names if not any(free in name for free in FREE) and name not in CHECKS]
        assert extra == []


def test_a_table_of_powers_is_made_on_its_device_and_not_kept(interpreter: None) -> None:
    """Nothing of the host is copied, which a CUDA graph could not capture."""
    from ctpo_kernels.loss_triton import _power

    with Watch() as operations:
        _, table = _power(0.3, 100, torch.device("meta"))
    assert table is not None and operations.devices == {"meta"}
    _, table = _power(0.3, 100, torch.device("cpu"))
    assert table is not None and table[99] == torch.tensor(100.0**0.3)
    gone = weakref.ref(table)
    del table
    assert gone() is None


def test_every_launch_is_on_the_device_of_its_tensors() -> None:
    """Triton takes the current device, so no kernel is started but by `dispatch.launch`, which enters theirs."""
    started = {
        f"{path.name}:{node.lineno}"
        for path in Path(ck.__file__).parent.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and "kernel" in ast.unparse(node.func.value)
    }
    assert len(started) == 1
    assert started.pop().startswith("dispatch.py:")
