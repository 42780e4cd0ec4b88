"""The driver: Algorithm 1 of CTPO on rank zero. `ctpo train`, or `torchrun ... -m ctpo_megatron.train`."""

from __future__ import annotations

import logging
import runpy
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

if __name__ == "__main__":
    # As torchrun starts it; this does not return. The command line imports the module, once libraries that make
    # temporary files as they are imported may do so.
    sys.argv.insert(1, "train")
    runpy.run_module("ctpo_megatron.cli", run_name="__main__")

from ctpo_megatron.base.extensions import activate
from ctpo_megatron.base.stop import StopSignal
from ctpo_megatron.config import Config
from ctpo_megatron.policy import capabilities, destroy_distributed, init_distributed
from ctpo_megatron.run import (
    Checkpoints,
    Reporter,
    Run,
    TrainerGroup,
    former_choice,
    is_finished,
    open_run_directory,
    record_finish,
    start_services,
)
from ctpo_megatron.sft import fine_tune

if TYPE_CHECKING:
    from ctpo_megatron.engines import RayRuntime

log = logging.getLogger(__name__)


def main(config: Config, stop: StopSignal, ray: RayRuntime | None = None) -> int:
    """Run all stages of a configuration; returns the exit status. Every rank of the job calls this.

    ray: of the engines, where it has been begun.
    """
    activate(config.extensions.path or ())
    layout = init_distributed(config.policy, config.run.seed)
    with ExitStack() as stack:
        stack.callback(destroy_distributed)
        trainer = stack.enter_context(TrainerGroup(config, layout, stop))
        return run_stages(config, trainer, stop, ray) if layout.is_rank_zero else trainer.serve()


def run_stages(config: Config, trainer: TrainerGroup, stop: StopSignal, ray: RayRuntime | None = None) -> int:
    """Start, fine-tune, reinforce, export, report. Rank zero calls this."""
    if is_finished(config.run):
        return 0
    config = trainer.settle(former_choice(config.run))
    directory = open_run_directory(config)
    with ExitStack() as stack:
        report = stack.enter_context(Reporter.of(config, directory, trainer.layout.world_size))
        trainer.dump_stacks(directory, phases=report.phases)
        log.info(capabilities().describe(config.policy.layer_spec, config.policy.dtype))
        with report.stage("start"):
            services = stack.enter_context(start_services(config, directory, report.phases, stop, ray))
            stack.callback(trainer.disconnect)
            checkpoints = Checkpoints(config, trainer, directory, services.rollouts, report)
            run = Run(config, trainer, services, checkpoints, report, stop)
            checkpoint = checkpoints.find()
            trainer.build(checkpoints.start_weights(checkpoint))
        if capabilities().cuda:
            with report.stage("kernels"):
                trainer.compile_kernels()
        if (sft := checkpoints.sft_to_do(checkpoint)) is not None:
            with report.stage("sft"):
                fine_tune(sft, run, trainer, checkpoints, report, checkpoint)
            if run.stopped:
                return stop.leave()
            checkpoint = None
        with report.stage("rl"), trainer.stop_deferred():
            trainer.prepare_rl()
            run.restore(checkpoint)
            services.record_data()
            with run.progress_noted():
                reinforce(run, trainer)
            if not run.end():
                return stop.leave()
        if config.export.enabled:
            with report.stage("export"):
                trainer.export(directory / config.export.directory, run.done)
        report.finish()
        record_finish(directory, run.done)
    return 0


def reinforce(run: Run, trainer: TrainerGroup) -> None:
    """CTPO: sample groups with the current weights, score, update against them, publish the new weights.

    What `trainer` does happens on all ranks; the rest on rank zero.
    """
    run.publish()
    run.begin()
    for step in run.steps():
        batch = run.next_batch(step)
        if batch is None:  # stopped while sampling
            break
        result = trainer.train(batch)
        if not trainer.stop_agreed():
            run.publish()
        run.finish_step(step, batch, result)
