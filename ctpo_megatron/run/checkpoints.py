"""Checkpoints of trainer and run state. A resume renames what was written after the checkpoint it continues from."""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ctpo_megatron.base.exports import discard_exports
from ctpo_megatron.base.files import FULL_PAUSE_S, FULL_S, DamagedFileError, read_mapping, write_json
from ctpo_megatron.base.run_paths import AHEAD, RunPaths, step_in
from ctpo_megatron.config import Config, SftConfig, evaluates
from ctpo_megatron.data.trajectory_file import encode_ahead, read_ahead
from ctpo_megatron.policy import (
    CheckpointError,
    CheckpointWriteError,
    discard_checkpoints,
    latest_checkpoint,
    read_checkpoint_marker,
)
from ctpo_megatron.rollouts import Rollouts
from ctpo_megatron.run.directory import finished_steps, take_over, written_by_another_version
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
        self._first = 0
        self._finished = finished_steps(directory)  # before a resume, which clears it
        self.write_s = 0.0

    def find(self) -> Path | None:
        """The checkpoint to continue from: `checkpoint.load`, else the newest of a run that is resumed, else none.

        With `run.resume: auto` a checkpoint of another run is where this one begins, not where a restart continues.
        Raises CheckpointError where a resume would repeat, and discard, steps of a finished run.
        """
        load = None if self._config.checkpoint.load is None else Path(self._config.checkpoint.load)
        resume = self._config.run.resume
        elsewhere = load is not None and not load.resolve().is_relative_to(self._directory.resolve())
        if not resume or (load is not None and not (resume == "auto" and elsewhere)):
            return load
        newest = latest_checkpoint(self._directory)
        self._check_extended(newest)
        if newest is None and not self._paths.sft_record.is_file():
            newest = latest_checkpoint(self._paths.sft_checkpoints)
        return newest or load

    def _check_extended(self, newest: Path | None) -> None:
        step = 0 if newest is None else step_in(newest.name)
        if step is None or step >= self._finished:
            return
        has = "no checkpoint" if newest is None else f"no checkpoint after step {step}"
        back = "" if newest is None else f"checkpoint.load={newest} goes back to step {step}; "
        model = self._root / self._config.export.directory
        raise CheckpointError(
            f"{self._root} has finished its {self._finished} steps and has {has}: a resume would repeat those steps, "
            f"and discard what they have written. {back}run.name=other model.path={model} trains its model further in "
            "another run; run.overwrite=true deletes this run and starts again"
        )

    def start_weights(self, checkpoint: Path | None) -> Path | None:
        """Directory of the weights to build the model with, if SFT has been done before a resume.

        None: `model.path` has them, or `checkpoint` will give others. Raises CheckpointError when the SFT model is not
        what was written.
        """
        if checkpoint is not None or self._config.sft is None or not self._paths.sft_record.is_file():
            return None
        model, record = self._paths.sft_model, self._paths.sft_record
        files = read_mapping(record)["files"]
        if broken := [name for name, digest in files.items() if _digest(model / name) != digest]:
            raise CheckpointError(
                f"the model after SFT is damaged or was changed: {', '.join(broken)} in {model}; remove {record} to do "
                "the SFT again"
            )
        self._report.note(f"RL starts from the SFT model in {model}")
        return model

    def sft_to_do(self, checkpoint: Path | None) -> SftConfig | None:
        """The supervised stage, if it is still to be done before RL.

        Raises CheckpointError for a damaged checkpoint, and for one of SFT when the configuration has none.
        """
        sft = self._config.sft
        if checkpoint is None:
            return None if self._paths.sft_record.is_file() else sft
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
        self._take_over()
        self._paths.sft_record.unlink(missing_ok=True)
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
        """Keep the model after SFT: RL starts from it again when the run is resumed, and others by `model.path`.

        The record, of a digest of each file of the model, is written last.
        """
        model = self._paths.sft_model
        self._trainer.export(model)
        files = {str(path.relative_to(model)): _digest(path) for path in sorted(model.rglob("*")) if path.is_file()}
        write_json(self._paths.sft_record, {"files": files}, durable=True)
        self._drop_sft()

    def restore(self, checkpoint: Path | None) -> int | None:
        """Put trainer and rollouts where `checkpoint` was saved; without one the run starts from its beginning.

        Returns the RL steps done, None at the beginning.

        Checkpoints, dumps and lines of metrics of later steps get names that nothing reads. Raises CheckpointError when
        the checkpoint is damaged, of another model or version, or of a run on other prompts.
        """
        if checkpoint is None:
            self._start_over()
            return None
        # Loaded first: what refuses the checkpoint does so before anything is discarded.
        state = self._trainer.load(checkpoint, self._config.run.steps)
        _check_version(checkpoint, state, "rollouts")
        own = checkpoint.resolve().parent == self._directory.resolve()
        self._first = state.get("first_step", state["step"]) if own else state["step"]
        if own:
            self._saved = state["step"]
        self._rewind(checkpoint, state)
        done: int = state["step"]
        self._report.warn_of_lost(self._first, done)
        if own and done == self._finished < self._config.run.steps:
            self._report.note(_extends(self._config, done))
        return done

    def save(self, done: int) -> None:
        """Checkpoint the trainer and the state of the run after `done` steps.

        A full disk is waited for, and a process that dies while it writes is replaced. Raises CheckpointWriteError.
        """
        _until_written(lambda: self._save(done))

    def save_again(self, done: int, failed: CheckpointWriteError) -> None:
        """The same after a save in the background has `failed`; returns when it is complete."""
        if failed.late:
            raise failed
        log.warning("%s. The state after step %d is saved instead", failed, done)
        _until_written(lambda: self._save(done) or self._trainer.finish_save())

    def _save(self, done: int) -> CheckpointWriteError | None:
        began = time.monotonic()
        with self._report.phase("checkpoint"):
            settings, state = self._config.checkpoint, self._state(done)
            ahead = state["rollouts"].pop("ahead", None)  # a file of its own, encoded by a thread
            attached = {} if ahead is None else {AHEAD: partial(encode_ahead, ahead)}
            self._report.flush()  # a resume from this checkpoint must find the lines of all its steps
            parts: dict[str, Any] = {"state": state, "score": self._score(done), "attached": attached}
            failed = self._trainer.save(self._directory, done, settings, **parts)
            self._trainer.release()
            if failed is not None:
                return failed
            # Once RL has a complete checkpoint, no resume returns to SFT.
            if latest_checkpoint(self._directory) is not None:
                self._drop_sft()
        self._saved, self.write_s = done, time.monotonic() - began
        self._report.log(done, {})
        return None

    def ensure_saved(self, done: int) -> None:
        """Make sure that a complete checkpoint of these steps exists."""
        self._report.timer.metrics()  # of a step that was cut short, they belong to no line
        # Of an earlier step, or of this one: it must be complete before the process ends.
        if (failed := self._trainer.finish_save()) is not None:
            self.save_again(done, failed)
        elif self._saved != done:
            _until_written(lambda: self._save(done) or self._trainer.finish_save())

    def _drop_sft(self) -> None:
        shutil.rmtree(self._paths.sft_checkpoints, ignore_errors=True)

    def _state(self, done: int) -> dict[str, Any]:
        return {
            "step": done,
            "weights_version": self._trainer.version,
            "rollouts": self._rollouts.state_dict(),
            "metrics": self._report.latest,
            "first_step": self._first,
        }

    def _score(self, step: int) -> float | None:
        settings = self._config.checkpoint
        score = self._report.latest.get(settings.best_metric)
        if settings.keep_best and score is None:
            log.warning("step %d has no %s (checkpoint.best_metric): not among the best", step, settings.best_metric)
        return score

    def _start_over(self) -> None:
        lost = self._report.latest["step"]
        if lost > 0:
            log.warning(
                "%s has no checkpoint: its %d steps are discarded, and it starts from its beginning. If it was begun "
                "with checkpoint.load, stop it and give that again",
                self._directory.parent,
                lost,
            )
        self._discard(after=-1)

    def _rewind(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        try:
            ahead = read_ahead(checkpoint)
            self._rollouts.load_state_dict(state["rollouts"] | ({} if ahead is None else {"ahead": ahead}))
        except (ValueError, DamagedFileError) as error:
            raise CheckpointError(f"{checkpoint} does not fit this run: {error}") from error
        self._discard(state["step"], state["metrics"])
        self._report.note(f"continuing after step {state['step']}, from {checkpoint}")

    def _take_over(self) -> None:
        if self._config.run.resume:
            take_over(self._config)

    def _discard(self, after: int, record: Mapping[str, Any] | None = None) -> None:
        self._take_over()
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


def _extends(config: Config, done: int) -> str:
    """Say that a finished run of `done` steps is made longer, and what a run of all steps would have done otherwise."""
    steps, schedule = config.run.steps, config.policy.optimizer.schedule
    evaluated = evaluates(config) and not config.eval.due(done, steps)
    ahead = "rollout.lag" if config.rollout.lag else "rollout.max_staleness"
    dumped = done > 1 and done % config.tracking.dump_every
    unlike = [
        (schedule != "constant", f"learning rates until step {done} (policy.optimizer.schedule: {schedule})"),
        (evaluated, f"step {done} has an evaluation (eval.every)"),
        (dumped, f"step {done} has the dump and figures of a last step (tracking.dump_every)"),
        (config.rollout.ahead, f"nothing was sampled ahead for step {done + 1} ({ahead})"),
    ]
    differs = "; ".join(text for is_so, text in unlike if is_so)
    extends = f"a finished run of {done} steps is extended to {steps}"
    return (
        f"{extends}. Unlike a run of {steps} steps: {differs}" if differs else f"{extends}, as a run of {steps} steps"
    )


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


_ORDERED_BY = {
    "seed": "run.seed",
    "conversations_per_step": "sft.conversations_per_step",
    "conversations": "sft.data, data.system_prompt, data.tool_in_prompt, tokenizer or chat template",
}
"""What the order of batches follows from -> the keys that decide it."""


def _check_version(checkpoint: Path, state: Mapping[str, Any], key: str) -> None:
    if key not in state:
        checkpoints = next((folder for folder in checkpoint.parents if folder.name == "checkpoints"), checkpoint.parent)
        raise CheckpointError(written_by_another_version(checkpoint, checkpoints.parent))


def _check_order(checkpoint: Path, saved: Mapping[str, Any], ours: Mapping[str, Any], rerendered: bool) -> None:
    changed = [
        f"{name} ({saved.get(key)}, now {ours[key]})"
        for key, name in _ORDERED_BY.items()
        if ours[key] != saved.get(key) and not (rerendered and key == "conversations")
    ]
    if changed:
        raise CheckpointError(
            f"{checkpoint} is in the middle of other batches: changed {'; '.join(changed)}. Give SFT what it was begun "
            "with, or begin it again in a run of another name; data.rerender=true continues with other tokens"
        )


def _digest(path: Path) -> str:
    """Return the blake2b-128 of a file, "" of one that is not there."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
