"""Trainer ranks set CUDA's variables before CUDA starts, for themselves, and never over the user's."""

from __future__ import annotations

import os

import pytest

from ctpo_megatron import cli
from ctpo_megatron.base import cuda_environment
from ctpo_megatron.base.cuda_environment import MAX_CONNECTIONS, of_this_rank
from ctpo_megatron.cli import train


class CudaStarts(Exception):
    """In place of the first question to CUDA."""


@pytest.mark.parametrize(
    ("ranks", "users", "built_for", "seen"),
    [
        (2, None, "13.0", "1"),
        (2, "32", "13.0", "32"),  # the user's wins
        (2, "", "13.0", ""),
        (1, None, "13.0", None),  # nothing to hide
        (2, None, None, None),  # a CPU
    ],
)
def test_kernels_are_ordered_before_cuda_starts(
    ranks: int, users: str | None, built_for: str | None, seen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str | None] = []

    def start() -> bool:
        found.append(os.environ.get(MAX_CONNECTIONS))
        raise CudaStarts

    monkeypatch.setenv(MAX_CONNECTIONS, users or "")  # restored at the end, whatever the rank sets
    if users is None:
        monkeypatch.delenv(MAX_CONNECTIONS)
    monkeypatch.setattr(cuda_environment, "_ours", set())
    monkeypatch.setattr(train, "has_cuda_device", start)
    monkeypatch.setattr(train, "torch_cuda", lambda: built_for)
    assert cli.main(["train", "configs/quickstart.yaml", f"policy.tensor_model_parallel_size={ranks}"]) != 0
    assert found == [seen]
    assert of_this_rank() == ({MAX_CONNECTIONS} if seen == "1" else set())
