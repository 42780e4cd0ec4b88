"""The driver: Algorithm 1 of CTPO, run by every rank. `ctpo train`, or `torchrun ... -m ctpo_megatron.train`."""

from __future__ import annotations

import logging
import runpy
import sys
from contextlib import ExitStack
from pathlib import Path

from ctpo_megatron.base.extensions import activate
from ctpo_megatron.config import Config, family_for, run_chat_template, shares_gpus
from ctpo_megatron.data import prepare
from ctpo_megatron.policy import (
    Layout,
    Trainer,
    TrainSettings,
    capabilities,
    destroy_distributed,
    init_distributed,
)
from ctpo_megatron.run import (
    Bridge,
    Persistence,
    Preemption,
    Reporter,
    RunState,
    StopOrLostRank,
    is_finished,
    open_reporter,
    open_run_directory,
    record_finish,
    start_services,
)
from ctpo_megatron.sft import fine_tune

log = logging.getLogger(__name__)


def main(config: Config) -> int:
    """Run all stages of a configuration; returns the exit status. Every rank of the job calls this."""
    activate(config.extensions.path or ())
    preemption = Preemption.of(config)
    layout = init_distributed(config.policy, config.run.seed)
    with ExitStack() as stack:
        stack.callback(destroy_distributed)
        return run_stages(config, layout, preemption, stack)


def run_stages(config: Config, layout: Layout, preemption: Preemption, stack: ExitStack) -> int:
    """Prepare, start, fine-tune, reinforce, export, report. stack: closes what is opened, in reverse order."""
    if layout.on_rank_zero(lambda: is_finished(config)):
        return 0
    directory = layout.on_rank_zero(lambda: open_run_directory(config))
    report = stack.enter_context(open_reporter(config, layout, directory))
    log.info(capabilities().describe(config.policy.layer_spec, config.policy.dtype))
    if (task := config.prepare) is not None:
        with report.stage("prepare"):
            layout.on_rank_zero(lambda: prepare(task, config.rollout.tool_parser.name))

    with report.stage("start"):
        services = layout.keep_on_rank_zero(
            lambda: stack.enter_context(start_services(config, directory, report, StopOrLostRank(preemption, layout)))
        )
        rollouts = stack.enter_context(Bridge(layout, services, report, config, shared=shares_gpus(config)))
        policy = Trainer(
            config.policy,
            layout,
            Path(config.model.path),
            temperature=config.rollout.temperature,
            family=family_for(config),
            acquire_gpu=rollouts.give_way,
        )
    persistence = Persistence(config, layout, directory, services, report)
    run, checkpoint = RunState(config, preemption), persistence.find()
    if (sft := persistence.sft_to_do(checkpoint)) is not None:
        with report.stage("sft"):
            fine_tune(sft, policy, run, persistence, report, checkpoint, rollouts.check_start)
        if run.preempted:
            return preemption.leave()
        checkpoint = None
    with report.stage("rl"), preemption.deferred():
        policy.prepare_rl(train_settings(config), report)
        persistence.restore(policy, run, checkpoint)
        reinforce(config, policy, run, rollouts, persistence, report)
        if run.preempted:
            rollouts.end_evaluation()
            persistence.ensure_saved(policy, run)
            return preemption.leave()
        rollouts.settle()
        policy.finish_save()
    if config.export.enabled:
        with report.stage("export"):
            policy.export(directory / config.export.directory, run_chat_template(config.model))
    report.finish()
    layout.on_rank_zero(lambda: record_finish(directory, config.run.steps))
    return 0


def train_settings(config: Config) -> TrainSettings:
    """What the RL phase of a configuration asks of the trainer."""
    return TrainSettings.of(
        config.objective,
        config.policy,
        config.rollout,
        batches=config.run.steps,
        skip_zero_advantage=config.leaves_out_zero_advantage,
        diagnostics=config.tracking.trajectories != "none",
    )


def reinforce(
    config: Config, policy: Trainer, run: RunState, rollouts: Bridge, persistence: Persistence, report: Reporter
) -> None:
    """CTPO: sample groups with the current weights, score, update against them, publish the new weights."""
    rollouts.publish(policy, run.version)
    if not run.resumed or (run.evaluates and rollouts.lacks_evaluation()):
        report.log(run.done, {})
        if run.evaluates:
            rollouts.evaluate(run.done, policy, awaited=run.awaits_evaluation)
    if not run.resumed and config.checkpoint.every:
        persistence.save(policy, run)
    for step in run.steps():
        with report.phase("step"):
            batch = rollouts.next_batch(step, policy)
            if batch is None:
                return run.stop()
            result = policy.train(batch)
            version = run.advance()
            rollouts.end_evaluation()
            if not run.notice():
                rollouts.publish(policy, version)
        report.log_step(step, batch, result.metrics, result.diagnostics)
        if run.evaluates and not run.preempted:
            rollouts.evaluate(step, policy, awaited=run.awaits_evaluation)
        if run.notice():
            return None
        if run.saves:
            persistence.save(policy, run)
        policy.finish_save(wait=False)


if __name__ == "__main__":
    # As torchrun starts it. The command line imports this module, which therefore does not import it.
    sys.argv.insert(1, "train")
    runpy.run_module("ctpo_megatron.cli", run_name="__main__")
