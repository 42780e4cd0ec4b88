"""The exit status of a verb that fails: the cause decides it, and whether the run had trained."""

from __future__ import annotations

import errno
import importlib
import os
from collections.abc import Iterator

import pytest

from ctpo_megatron.base.stop import BEGUN, TRY_AGAIN
from ctpo_megatron.cli.errors import _FAILED_ELSEWHERE, _PASSING, _USER_ERRORS, report_error
from ctpo_megatron.config import Problem
from ctpo_megatron.policy import CheckpointError, CheckpointWriteError, RankZeroError


class Refusals:
    """Every error whose message is all that the user needs, and its exit status at the start and later."""

    @staticmethod
    def of(begun: bool) -> Iterator[tuple[Exception, int]]:
        passing = [kind for kinds in _PASSING.values() for kind in kinds]
        for module, names in (*_USER_ERRORS.items(), *_FAILED_ELSEWHERE.items()):
            for name in names:
                kind = getattr(importlib.import_module(module), name)
                error = kind([Problem("run", "is wrong")]) if name == "ConfigError" else kind("it is wrong")
                refused = 1 if name in _FAILED_ELSEWHERE.get(module, ()) else 2
                if begun:
                    error.add_note(f"{BEGUN} 3")
                yield error, TRY_AGAIN if begun and name in passing else refused


@pytest.mark.parametrize("begun", [False, True])
def test_the_cause_decides_the_status(begun: bool, capsys: pytest.CaptureFixture[str]) -> None:
    found = {type(error).__name__: (report_error(error, "train"), wanted) for error, wanted in Refusals.of(begun)}
    assert {name: status for name, (status, _) in found.items()} == {
        name: wanted for name, (_, wanted) in found.items()
    }
    assert {"TooManyFailed", "ReplayError", "SandboxUnavailable", "EngineError"} <= found.keys()
    said = capsys.readouterr().err
    assert said.count("is wrong\n") == len(found) and "Traceback" not in said


@pytest.mark.parametrize(
    ("number", "status"),
    [(errno.ENOSPC, TRY_AGAIN), (errno.EDQUOT, TRY_AGAIN), (errno.ESTALE, TRY_AGAIN), (errno.EROFS, 1)],
)
def test_a_full_disk_passes_and_a_read_only_one_does_not(number: int, status: int) -> None:
    full = OSError(number, os.strerror(number), "runs/first/metrics.jsonl")
    assert report_error(full, "train") == 1
    full.add_note(f"{BEGUN} 3")
    assert report_error(full, "train") == status


def test_a_checkpoint_that_cannot_be_written_is_no_refusal() -> None:
    assert report_error(CheckpointWriteError("a checkpoint could not be written"), "train") == TRY_AGAIN
    of_a_rank = RankZeroError("rank 1 stops, rank 0 failed")
    of_a_rank.__cause__ = CheckpointWriteError("a checkpoint could not be written")
    assert report_error(of_a_rank, "train") == TRY_AGAIN
    of_a_rank.__cause__ = CheckpointError("is damaged")
    assert report_error(of_a_rank, "train") == 2


def test_the_first_full_disk_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        try:
            raise OSError(errno.ENOSPC, "No space left on device", "runs/first/metrics.jsonl")
        finally:
            raise OSError(errno.ENOSPC, "No space left on device", "runs/first/.stages.json.tmp")
    except OSError as error:
        report_error(error, "train")
    assert "metrics.jsonl" in capsys.readouterr().err
