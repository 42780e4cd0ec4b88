"""The detector itself: what it refuses and counts is what CUDA refuses and waits for."""

from __future__ import annotations

import pytest
import torch

from tests.rehearsal import detector
from tests.rehearsal.budget import limit, over_budget
from tests.rehearsal.cases import CASES
from tests.support import ranks

pytestmark = pytest.mark.slow  # of the harness, which changes seldom


def test_operands_of_two_devices_and_hidden_copies_are_refused() -> None:
    (found,) = ranks.run(detector.refusals, pretend_cuda=True)
    assert found.keys() == detector.REFUSED.keys()
    assert "cpu and cuda:0" in found["sum"] and "can't convert cuda:0" in found["numpy"]


def test_what_cuda_takes_is_not_refused() -> None:
    assert ranks.run(detector.allow, pretend_cuda=True) == [list(detector.ALLOWED)]


def test_every_wait_for_the_device_is_counted() -> None:
    (found,) = ranks.run(detector.waits, pretend_cuda=True)
    assert found == {name: count for name, (count, _) in detector.WAITS.items()}


def test_one_wait_more_than_the_budget_has_is_named() -> None:
    most = limit("update", f"ours {CASES[0].head}", [2])
    for times in (most, most + 1):
        (counts,) = ranks.run(detector.spend, times, pretend_cuda=True)
        problems = over_budget(counts, {"update": [2]}, CASES[0])
        assert bool(problems) == (times > most)
    assert problems[0] == f"update, ours {CASES[0].head}: {most + 1} for [2] micro-batches, at most {most}:"
    assert problems[1].strip() == f"{most + 1} _local_scalar_dense at ctpo_megatron/policy/planted.py:1"


def test_tensors_say_that_they_are_on_the_gpu() -> None:
    (found,) = ranks.run(detector.devices, pretend_cuda=True)
    gpu = torch.device("cuda", 0)
    assert found.pop("back") == torch.device("cpu")
    assert found.pop("is_cuda") and found.pop("type") == "torch.cuda.FloatTensor"
    assert set(found.values()) == {gpu}


def test_the_accelerator_is_the_pretended_gpu() -> None:
    """torch's AdamW asks for its stream."""
    (found,) = ranks.run(detector.accelerator, pretend_cuda=True)
    assert set(found.values()) == {True} and len(found) == 4


def test_the_flag_makes_other_tests_pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks.Default, "pretend_cuda", True)
    assert ranks.run(torch.cuda.device_count)[0] > 0
