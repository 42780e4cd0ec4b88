"""The supervised stage: learning from conversations, through the same trainer step as RL."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from ctpo_megatron.checks import DataValidation
from ctpo_megatron.config import SftConfig
from ctpo_megatron.data import batch_order, batches
from ctpo_megatron.environments import log_left_out
from ctpo_megatron.run import Checkpoints, Reporter, Run, TrainerGroup

_CHECKED_EVERY = 10


def fine_tune(
    sft: SftConfig,
    run: Run,
    trainer: TrainerGroup,
    checkpoints: Checkpoints,
    report: Reporter,
    checkpoint: Path | None,
) -> None:
    """Train on the assistant's tokens of conversations, from `checkpoint` of this stage or the beginning.

    Every few steps it is checked whether the engines start, which load meanwhile. A run that is to stop is saved after
    the current step, and `run.stopped`. The model after the last step is kept. Raises DataError for bad
    files, ValueError when there are fewer conversations than one step takes.
    """
    config, every = run.config, run.config.checkpoint.sft_every
    found = DataValidation.of(config, config.run.directory).conversations()
    log_left_out(found)
    conversations = found.conversations
    trainer.use_optimizer(sft.optimizer, sft.steps)
    stopping = False
    with trainer.stop_deferred():
        order = batch_order(conversations, sft.conversations_per_step, config.run.seed)
        done = checkpoints.restore_sft(sft.steps, checkpoint, order)
        stream = islice(batches(conversations, sft.conversations_per_step, config.run.seed), done, sft.steps)
        for step, batch in enumerate(stream, start=done + 1):
            if step % _CHECKED_EVERY == 0:
                run.check_start()
            with report.phase("sft"):
                metrics = trainer.fine_tune(sft.conversations_per_step, conversations=batch)
            epoch = step * sft.conversations_per_step / len(conversations)
            report.log_sft(step, sft.steps, metrics | {"sft/epoch": epoch})
            stopping = trainer.stop_agreed()
            if stopping or (every and step % every == 0):
                checkpoints.save_sft(step, order)
            if (failed := trainer.finish_save(stopping or step == sft.steps)) is not None:
                raise failed
            if stopping:
                break
        if not stopping:
            checkpoints.finish_sft()
