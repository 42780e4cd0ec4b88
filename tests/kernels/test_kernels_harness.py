"""The harness that every kernel test runs in sees what it is there for."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

from ctpo_kernels import vocab_parallel_log_probs


@pytest.fixture
def planted(interpreter: None) -> Any:
    """The kernels with mistakes, defined for the interpreter."""
    return importlib.import_module("tests.kernels.planted_kernels")


def test_programs_that_leave_each_other_alone_pass(planted: Any) -> None:
    values, out = torch.arange(20.0), torch.zeros(20)
    planted.neighbours_kernel[(3,)](values, out, 20, BLOCK=8, STEP=8)
    assert torch.equal(out, values)


@pytest.mark.parametrize("step", [7, 4])
def test_two_programs_that_store_to_one_place(planted: Any, step: int) -> None:
    with pytest.raises(AssertionError, match=r"neighbours_kernel: race: \d+ places are stored to by one program"):
        planted.neighbours_kernel[(4,)](torch.arange(20.0), torch.zeros(20), 20, BLOCK=8, STEP=step)


def test_programs_come_in_another_order(planted: Any) -> None:
    """In the order of the interpreter alone the carry would be right. A program reads what another one stores."""
    totals = torch.zeros(9, dtype=torch.int64)
    with pytest.raises(AssertionError, match="carry_kernel: race: 8 places are loaded by one program and stored"):
        planted.carry_kernel[(9,)](totals, 9)
    assert totals.tolist() != list(range(1, 10))


def test_accesses_behind_the_end(planted: Any) -> None:
    """The memory is there, so nothing faults; but it belongs to someone else."""
    values, out = torch.zeros(64), torch.zeros(64)
    with pytest.raises(AssertionError, match="past_the_end_kernel: 4 stores outside of the arguments; 4 loads outside"):
        planted.past_the_end_kernel[(3,)](values[:20], out[:20], 20, BLOCK=8)


def test_fresh_memory_is_poisoned() -> None:
    assert torch.empty(3).isnan().all()
    assert torch.zeros(1).new_empty(3, dtype=torch.float64).isnan().all()
    assert (torch.empty_like(torch.zeros(3, dtype=torch.int64)) == torch.iinfo(torch.int64).max).all()


def test_our_kernels_run_in_the_harness(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that hands strided labels to a kernel which reads them densely does not pass."""
    from ctpo_kernels import labels

    monkeypatch.setattr(labels, "checked", lambda rows, given, *_: given)
    with pytest.raises(AssertionError, match="row_stats_kernel: 6 loads outside of the arguments"):
        vocab_parallel_log_probs(torch.zeros(9, 5), torch.zeros(9, 3, dtype=torch.int64)[:, 1])
