"""Checkpoints of trainer and run state. A resume renames what was written after the checkpoint it continues from."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ctpo_megatron.base.exports import discard_exports
from ctpo_megatron.base.files import FULL_PAUSE_S, FULL_S, DamagedFileError
from ctpo_megatron.base.run_paths import AHEAD, RunPaths
from ctpo_megatron.config import Config, SftConfig
from ctpo_megatron.data.trajectory_file import encode_ahead, read_ahead
from ctpo_megatron.policy import (
    CheckpointError,
    CheckpointWriteError,
    discard_checkpoints,
    latest_checkpoint,
    read_checkpoint_marker,
)
from ctpo_megatron.rollouts import Rollouts
from ctpo_megatron.run.directory import take_over, written_by_another_version
from ctpo_megatron.run.ranks import TrainerGroup
from ctpo_megatron.run.reporter import Reporter

log = logging.getLogger(__name__)

_SFT_STATE = {"step", "order"}
"""Keys of what a checkpoint of SFT says of the run; one of RL has others, too."""


class Checkpoints:
    """Saves and restores a run. Lives on rank zero, whose state a checkpoint keeps.

    write_s: seconds that the last checkpoint has kept the run from training; 0: none was written.
    """

    def __init__(
        self, config: Config, trainer: TrainerGroup, directory: Path, rollouts: Rollouts, report: Reporter
    ) -> None:
        self._config, self._trainer, self._rollouts, self._report = config, trainer, rollouts, report
        self._root, self._paths = directory, RunPaths(directory)
        self._directory = self._paths.checkpoints
        self._saved: int | None = None
        self.write_s = 0.0

    def find(self) -> Path | None:
        """Return the checkpoint to continue from: `checkpoint.load`, else the newest of a run that is resumed, else
        none.

        With `run.resume: auto` a checkpoint of another run is where this one begins, not where a restart continues.
        """
        load = None if self._config.checkpoint.load is None else Path(self._config.checkpoint.load)
        resume = self._config.run.resume
        elsewhere = load is not None and not load.resolve().is_relative_to(self._directory.resolve())
        if not resume or (load is not None and not (resume == "auto" and elsewhere)):
            return load
        newest = latest_checkpoint(self._directory)
        if newest is None and not self._has_tuned:
            newest = latest_checkpoint(self._paths.sft_checkpoints)
        return newest or load

    @property
    def _has_tuned(self) -> bool:
        """Whether the supervised stage has ended: an export is there whole, or not at all."""
        return (self._paths.sft_model / "config.json").is_file()

    def start_weights(self, checkpoint: Path | None) -> Path | None:
        """Directory of the weights to build the model with, if SFT has been done before a resume.

        None: `model.path` has them, or `checkpoint` will give others.
        """
        if checkpoint is not None or self._config.sft is None or not self._has_tuned:
            return None
        self._report.note(f"RL starts from the SFT model in {self._paths.sft_model}")
        return self._paths.sft_model

    def sft_to_do(self, checkpoint: Path | None) -> SftConfig | None:
        """Return the supervised stage, if it is still to be done before RL.

        Raises CheckpointError for a damaged checkpoint, and for one of SFT when the configuration has none.
        """
        sft = self._config.sft
        if checkpoint is None:
            return None if self._has_tuned else sft
        # Not by its folder: a checkpoint may have been brought from elsewhere.
        if not read_checkpoint_marker(checkpoint).run.keys() <= _SFT_STATE:
            return None
        if sft is None:
            raise CheckpointError(
                f"{checkpoint} is of the SFT stage, which this configuration does not have (sft: null)"
            )
        return sft

    def restore_sft(self, total_steps: int, checkpoint: Path | None, order: Mapping[str, Any]) -> int:
        """Put trainer and `sft.jsonl` where `checkpoint` was saved, or at the beginning; returns the SFT steps done.

        order: what decides the order of batches (`data.batch_order`). Raises CheckpointError if it was another.
        """
        done = -1
        if checkpoint is not None:
            state = self._trainer.load(checkpoint, total_steps)
            _check_version(checkpoint, state, "order")
            _check_order(checkpoint, state["order"], order, self._config.data.rerender)
            done = state["step"]
        take_over(self._config)
        shutil.rmtree(self._paths.sft_model, ignore_errors=True)
        discard_checkpoints(self._paths.sft_checkpoints, done)
        self._report.begin_sft(done)
        if checkpoint is not None:
            self._report.note(f"continuing after SFT step {done}, from {checkpoint}")
        return max(done, 0)

    def save_sft(self, step: int, order: Mapping[str, Any]) -> None:
        """Checkpoint the trainer after `step` SFT steps over batches in this order."""
        settings = self._config.checkpoint.model_copy(update={"keep_best": 0})
        state = {"step": step, "order": dict(order)}
        _until_written(lambda: self._trainer.save(self._paths.sft_checkpoints, step, settings, state=state))

    def finish_sft(self) -> None:
        """Keep the model after SFT: RL starts from it again when the run is resumed, and others by `model.path`."""
        self._trainer.export(self._paths.sft_model)
        self._drop_sft()

    def restore(self, checkpoint: Path | None) -> int | None:
        """Put trainer and rollouts where `checkpoint` was saved; without one the run starts from its beginning.

        Returns the RL steps done, None at the beginning.

        Checkpoints, dumps and lines of metrics of later steps get names that nothing reads. Raises CheckpointError when
        the checkpoint is damaged, of another model or version, or of a run on other prompts.
        """
        if checkpoint is None:
            if (lost := self._report.latest["step"]) > 0:
                log.warning(
                    "%s has no checkpoint: its %d steps are discarded, and it starts from its beginning. If it was "
                    "begun with checkpoint.load, stop it and give that again",
                    *(self._root, lost),
                )
            self._discard(after=-1)
            return None
        # Loaded first: what refuses the checkpoint does so before anything is discarded.
        state = self._trainer.load(checkpoint, self._config.run.steps)
        _check_version(checkpoint, state, "rollouts")
        try:
            ahead = read_ahead(checkpoint)
            self._rollouts.load_state_dict(state["rollouts"] | ({} if ahead is None else {"ahead": ahead}))
        except (ValueError, DamagedFileError) as error:
            raise CheckpointError(f"{checkpoint} does not fit this run: {error}") from error
        done: int = state["step"]
        if checkpoint.resolve().parent == self._directory.resolve():
            self._saved = done
        self._discard(done, state["metrics"])
        self._report.note(f"continuing after step {done}, from {checkpoint}")
        return done

    def save(self, done: int) -> None:
        """Checkpoint the trainer and the state of the run after `done` steps.

        A full disk is waited for, and a process that dies while it writes is replaced. Raises CheckpointWriteError.
        """
        _until_written(lambda: self._save(done))

    def complete(self, done: int, *, wait: bool) -> None:
        """Complete a save in the background, if there is one; without `wait`, only if it is done.

        Where it has failed, the state after `done` steps is saved instead, and waited for.
        """
        failed = self._trainer.finish_save(wait)
        if failed is None:
            return
        if failed.late:
            raise failed
        log.warning("%s. The state after step %d is saved instead", failed, done)
        self._save_whole(done)

    def ensure_saved(self, done: int) -> None:
        """Make sure that a complete checkpoint of these steps exists."""
        self._report.phases.metrics()  # of a step that was cut short, they belong to no line
        self.complete(done, wait=True)  # of an earlier step, or of this one
        if self._saved != done:
            self._save_whole(done)

    def _save_whole(self, done: int) -> None:
        _until_written(lambda: self._save(done) or self._trainer.finish_save())

    def _save(self, done: int) -> CheckpointWriteError | None:
        began = time.monotonic()
        with self._report.phase("checkpoint"):
            rollouts = self._rollouts.state_dict()
            ahead = rollouts.pop("ahead", None)  # a file of its own, encoded by a thread
            self._report.flush()  # a resume from this checkpoint must find the lines of all its steps
            state = {
                "step": done,
                "weights_version": self._trainer.version,
                "rollouts": rollouts,
                "metrics": self._report.latest,
            }
            failed = self._trainer.save(
                self._directory,
                done,
                self._config.checkpoint,
                state=state,
                score=self._score(done),
                attached={} if ahead is None else {AHEAD: partial(encode_ahead, ahead)},
            )
            self._trainer.release()
            if failed is not None:
                return failed
            # Once RL has a complete checkpoint, no resume returns to SFT.
            if latest_checkpoint(self._directory) is not None:
                self._drop_sft()
        self._saved, self.write_s = done, time.monotonic() - began
        self._report.log(done, {})
        return None

    def _drop_sft(self) -> None:
        shutil.rmtree(self._paths.sft_checkpoints, ignore_errors=True)

    def _score(self, step: int) -> float | None:
        settings = self._config.checkpoint
        score = self._report.latest.get(settings.best_metric)
        if settings.keep_best and score is None:
            log.warning("step %d has no %s (checkpoint.best_metric): not among the best", step, settings.best_metric)
        return score

    def _discard(self, after: int, record: Mapping[str, Any] | None = None) -> None:
        take_over(self._config)
        # Checkpoints first: a plain resume after a kill in between then rewinds to the same step again.
        renamed = discard_checkpoints(self._directory, after)
        if renamed:
            log.warning(
                "checkpoint.load=%s discards later checkpoints of this run, now named %s. Leave checkpoint.load out "
                "from now on: with it every restart begins there again",
                self._config.checkpoint.load,
                ", ".join(path.name for path in reversed(renamed)),
            )
        for path in discard_exports(self._root, self._config.export.directory, after):
            log.warning("%s is of a later step than this run continues from, and has this name now", path)
        self._report.discard(after, record)


def _until_written(write: Callable[[], CheckpointWriteError | None]) -> None:
    """Write a checkpoint, again for `FULL_S` while the disk is full, and twice at most where writers die."""
    deadline, tries = time.monotonic() + FULL_S, 0
    while (failed := write()) is not None:
        tries += 1
        if failed.late or (time.monotonic() > deadline if failed.full else tries > 1):
            raise failed
        limit = f"for {FULL_S:.0f} s" if failed.full else "once"
        if tries == 1:
            log.warning("%s. It is tried again %s", failed, limit)
        if failed.full:
            time.sleep(FULL_PAUSE_S)


def _check_version(checkpoint: Path, state: Mapping[str, Any], key: str) -> None:
    if key not in state:
        checkpoints = next((folder for folder in checkpoint.parents if folder.name == "checkpoints"), checkpoint.parent)
        raise CheckpointError(written_by_another_version(checkpoint, checkpoints.parent))


def _check_order(checkpoint: Path, saved: Mapping[str, Any], ours: Mapping[str, Any], rerendered: bool) -> None:
    known = {"conversations"} if rerendered else set()
    if changed := [key for key in ours if ours[key] != saved.get(key) and key not in known]:
        raise CheckpointError(
            f"{checkpoint} is in the middle of other batches: {', '.join(changed)} changed since. Give SFT what it was "
            "begun with, or begin it again in a run of another name; data.rerender=true continues with other tokens"
        )
