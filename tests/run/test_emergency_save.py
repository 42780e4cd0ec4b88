"""A run that cannot write saves its state, unless its weights are between two steps."""

from __future__ import annotations

import errno
from typing import Any, cast

import pytest

from ctpo_megatron.base.stop import BEGUN
from ctpo_megatron.run.run import Run


class Saves:
    """Stands for `Persistence`. fails: what a save raises."""

    def __init__(self, fails: Exception | None = None) -> None:
        self.saved: list[int] = []
        self._fails = fails

    def ensure_saved(self, step: int) -> None:
        """See Persistence."""
        self.saved.append(step)
        if self._fails is not None:
            raise self._fails


def ended(saves: Saves, *, within_updates: bool, error: Exception) -> Exception:
    """What ends a run that has done 14 steps and meets this error."""
    run = Run.__new__(Run)
    run.done, run._updating, run._persistence = 14, False, cast(Any, saves)
    with pytest.raises(type(error)) as caught, run.saved_at_least():
        if within_updates:
            run.begin_updates()
        raise error
    return caught.value


def test_the_state_after_the_last_step_is_saved() -> None:
    saves = Saves()
    error = ended(saves, within_updates=False, error=OSError(errno.ENOSPC, "No space"))
    assert saves.saved == [14] and error.__notes__ == [f"{BEGUN} 14"]


def test_weights_between_two_steps_are_not_saved_as_those_of_the_first() -> None:
    saves = Saves()
    assert ended(saves, within_updates=True, error=OSError(errno.ENOSPC, "No space")).__notes__ == [f"{BEGUN} 14"]
    assert saves.saved == []


def test_a_directory_that_was_removed_gets_no_checkpoint() -> None:
    saves = Saves()
    ended(saves, within_updates=False, error=FileNotFoundError(errno.ENOENT, "No such file", "runs/x/metrics.jsonl"))
    assert saves.saved == []


def test_a_save_that_fails_too_does_not_hide_what_came_first(caplog: pytest.LogCaptureFixture) -> None:
    saves = Saves(RuntimeError("rank 1 is gone"))
    assert ended(saves, within_updates=False, error=OSError(errno.ENOSPC, "No space")).args == (
        errno.ENOSPC,
        "No space",
    )
    assert "the state after step 14 could not be saved: rank 1 is gone" in caplog.text
