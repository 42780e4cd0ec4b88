"""The supervised stage: learning from conversations, through the same policy step as RL."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path

from ctpo_megatron.config import SftConfig
from ctpo_megatron.data import batch_order, batches, load_conversations
from ctpo_megatron.environments.factory import offered_schemas, system_prompt
from ctpo_megatron.environments.tokenizer import training_tokenizer
from ctpo_megatron.policy import Trainer, summarize_updates, supervised
from ctpo_megatron.run import Persistence, Reporter, RunState

_CHECKED_EVERY = 10


def fine_tune(
    sft: SftConfig,
    policy: Trainer,
    run: RunState,
    persistence: Persistence,
    report: Reporter,
    checkpoint: Path | None,
    check: Callable[[], None],
) -> None:
    """Train `policy` on the assistant's tokens of conversations, from `checkpoint` of this stage or the beginning.

    check: raises what would end the run afterwards; called every few steps.
    A run that is asked to end is checkpointed and left after the step at hand, with `run.preempted` set. Collective;
    every rank reads the conversations. Raises DataError for bad files, ValueError when there are fewer conversations
    than one step takes.
    """
    model, every = run.config.model, run.config.checkpoint.sft_every
    conversations = load_conversations(
        sft.data,
        training_tokenizer(run.config),
        tool_schemas=offered_schemas(run.config.data, run.config.rollout),
        chat_template_kwargs=model.chat_template_kwargs,
        system_prompt=system_prompt(run.config.data, run.config.rollout),
    )
    policy.use_optimizer(sft.optimizer, sft.steps)
    with run.preemption.deferred():
        order = batch_order(conversations, sft.conversations_per_step, run.config.run.seed)
        done = persistence.restore_sft(policy, sft.steps, checkpoint, order)
        stream = islice(batches(conversations, sft.conversations_per_step, run.config.run.seed), done, sft.steps)
        for step, batch in enumerate(stream, start=done + 1):
            if step % _CHECKED_EVERY == 0:
                check()
            with report.phase("sft"):
                (mini_batch,) = policy.distribute(batch, None, sft.conversations_per_step)
                metrics = summarize_updates([policy.update(mini_batch, supervised(), temperature=1.0)])
            report.log_sft(step, sft.steps, metrics)
            if run.notice() or (every and step % every == 0):
                persistence.save_sft(policy, step, order)
            policy.finish_save(wait=run.preempted or step == sft.steps)
            if run.preempted:
                return
