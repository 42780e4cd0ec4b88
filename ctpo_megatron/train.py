"""The driver: Algorithm 1 of CTPO, run by every rank. `ctpo train`, or `torchrun ... -m ctpo_megatron.train`."""

from __future__ import annotations

import logging
import runpy
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from transformers import AutoTokenizer

from ctpo_megatron.config import Config
from ctpo_megatron.data import Group, batches, load_conversations
from ctpo_megatron.objective import group_advantages, objective_from_config
from ctpo_megatron.policy import (
    Policy,
    capabilities,
    destroy_distributed,
    init_distributed,
    policy_gradient,
    summarize_updates,
    supervised,
)
from ctpo_megatron.run.preemption import EXIT_STATUS, Preemption
from ctpo_megatron.session import Session, check_mismatch

log = logging.getLogger(__name__)


def main(config: Config) -> int:
    """Run all stages of a configuration; returns the exit status. Every rank of the job calls this."""
    preemption = Preemption(config.checkpoint.grace_s)
    layout = init_distributed(config.policy, config.run.seed)
    try:
        with Session(config, layout, preemption) as session:
            log.info(capabilities().describe(config.policy.layer_spec, config.policy.dtype))
            session.prepare()
            with session.stage("start"):
                session.open_world()
                policy = Policy(config.policy, layout, Path(config.model.path), temperature=config.rollout.temperature)
            checkpoint = session.find_checkpoint()
            if checkpoint is None and config.sft is not None:
                with session.stage("sft"):
                    supervised_stage(config, policy, session)
            with session.stage("rl"), preemption.deferred():
                if not reinforce(config, policy, session, checkpoint, preemption):
                    return EXIT_STATUS
            if config.export.enabled:
                with session.stage("export"):
                    policy.export(session.directory / config.export.directory)
            session.finish()
    finally:
        destroy_distributed()
    return 0


def supervised_stage(config: Config, policy: Policy, session: Session) -> None:
    """Supervised learning on conversations, through the same policy step as RL."""
    settings = config.sft
    conversations = load_conversations(
        settings.data,
        AutoTokenizer.from_pretrained(config.model.path),
        chat_template_kwargs=config.model.chat_template_kwargs,
    )
    policy.use_optimizer(settings.optimizer, settings.steps)
    stream = batches(conversations, settings.conversations_per_step, config.run.seed)
    for step, batch in enumerate(islice(stream, settings.steps), start=1):
        with session.timer.phase("sft"):
            (mini_batch,) = policy.mini_batches(batch, None, settings.conversations_per_step)
            metrics = summarize_updates([policy.update(mini_batch, supervised(), temperature=1.0)])
        session.sft_progress(step, settings.steps, metrics)


def reinforce(
    config: Config, policy: Policy, session: Session, checkpoint: Path | None, preemption: Preemption
) -> bool:
    """CTPO: sample groups with the present weights, score, update against the anchor, hand the weights back.

    Returns False when a scheduler wants the machine back: the state after the last whole step is saved then.
    """
    objective = objective_from_config(config.objective)
    loss = policy_gradient(objective, config.objective.anchor)
    groups_per_update = config.policy.mini_batch_prompts
    updates_per_step = config.rollout.prompts_per_step // groups_per_update
    policy.use_optimizer(config.policy.optimizer, config.run.steps * updates_per_step)
    done, version = session.resume(policy, checkpoint)
    session.sync(policy, version)
    if checkpoint is None or session.lacks_evaluation(done):
        session.log(done, session.evaluate(done))
    if checkpoint is None and config.checkpoint.every:
        session.save(policy, 0, version)
    for step in range(done + 1, config.run.steps + 1):
        with session.timer.phase("step"):
            collected = session.collect(step)
            if collected is None:
                session.secure(policy, step - 1, version)
                return False
            groups, metrics = collected
            trajectories = [trajectory for group in groups for trajectory in group.trajectories]
            with session.timer.phase("old_log_probs"):
                mini_batches = policy.mini_batches(
                    trajectories, advantages(config, groups), groups_per_update * config.rollout.samples_per_prompt
                )
                metrics |= policy.compute_old_log_probs(mini_batches)
            check_mismatch(config, metrics)
            with session.timer.phase("update"):
                metrics |= summarize_updates([policy.update(mini_batch, loss) for mini_batch in mini_batches])
            with session.timer.phase("token_diagnostics"):
                diagnostics = (
                    policy.token_diagnostics(mini_batches[-1], objective) if config.tracking.trajectories else {}
                )
            version += 1
            if not (preempted := preemption.requested()):
                session.sync(policy, version)
        session.log(step, metrics | {"weights/version": float(version)}, groups, diagnostics)
        if not preempted and session.is_evaluated(step):
            session.log(step, session.evaluate(step))
        if preempted or preemption.requested():
            session.secure(policy, step, version)
            return False
        if config.checkpoint.every and step % config.checkpoint.every == 0:
            session.save(policy, step, version)
        policy.finish_save(wait=False)
    policy.finish_save()
    return True


def advantages(config: Config, groups: Sequence[Group]) -> list[float]:
    """One advantage per trajectory, in the order of the groups and of the samples in them."""
    return [a for group in groups for a in group_advantages(group.rewards, config.objective.advantage).tolist()]


if __name__ == "__main__":
    # As torchrun starts it. The command line imports this module, which therefore does not import it.
    sys.argv.insert(1, "train")
    runpy.run_module("ctpo_megatron.cli", run_name="__main__")
