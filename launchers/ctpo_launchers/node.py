"""The program that every node of a job runs: sandbox, Ray and torchrun, all of which end with it (docs/cluster.md).

python -m ctpo_launchers.node -- my.yaml run.resume=auto                                          # in a Slurm step
python -m ctpo_launchers.node --nodes 2 --node-rank 0 --head host0 -- my.yaml run.resume=auto     # by hand, on each
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ctpo_launchers import slurm
from ctpo_launchers.job import NodeJob
from ctpo_launchers.program import NodeProgram
from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.base.text import log_to_terminal, say
from ctpo_megatron.config import ConfigError, load_config
from ctpo_sandbox.arguments import positive

CHECK = "ctpo_megatron.cli.job_check"
"""What torchrun runs to look at the nodes, instead of the trainer."""
WRONG = 2
"""Exit status of an invalid request; for others see `NodeProgram`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    if "--" not in given:
        given.append("--")
    split = given.index("--")
    options = parser()
    args, arguments = options.parse_args(given[:split]), given[split + 1 :]
    if not arguments:
        options.error("after `--` comes what `ctpo train` takes: a configuration file, then a.b=c")
    try:
        if args.workdir is not None:
            os.chdir(args.workdir)
        job = NodeJob.of(args)
        log_to_terminal(f"{job.name(job.rank)}: %(message)s")
        logging.getLogger("ctpo_launchers").setLevel(logging.INFO)
        arguments += _of_the_job(job, arguments)
        config = load_config(arguments[0], arguments[1:])
        if args.check:
            args.module = CHECK
            args.directory = args.directory or RunPaths(config.run.directory).checked_nodes
        args.nproc_per_node = args.nproc_per_node or config.placement.trainer_gpus or 1
        program = NodeProgram(args, job, config, arguments)
        program.prepare()
    except (ConfigError, ValueError, OSError) as error:
        say(f"ctpo_launchers.node: {error}", error=True)
        return WRONG
    status = asyncio.run(program.run())
    if args.check and status:  # the problem has to be fixed: trying again would fail again
        status = WRONG
    program.status_file.write_text(f"{status}\n")
    return status


def _of_the_job(job: NodeJob, arguments: Sequence[str]) -> list[str]:
    """Overrides of the configuration that follow from the job."""
    added = []
    if job.nodes > 1:
        added.append(f"cluster.nodes={job.nodes}")
        if ipaddress.ip_address(job.address).is_loopback:  # several Ray nodes on one machine
            added.append(f"cluster.node_address={job.address if job.rank == 0 else job.head}")
    end = slurm.job_end()
    if end is not None and not any(text.startswith("run.deadline=") for text in arguments):
        added.append(f"run.deadline={end:.0f}")
    return added


def parser() -> argparse.ArgumentParser:
    """Return the command line of a node program, without what follows `--`."""
    arguments = argparse.ArgumentParser(prog="python -m ctpo_launchers.node", description=__doc__.splitlines()[0])
    add = arguments.add_argument
    add("--nodes", type=positive(int), metavar="N", help="nodes of the job (default: Slurm's, else 1)")
    add("--node-rank", type=int, metavar="R", help="this node's number; 0 is the head (default: Slurm's)")
    add("--head", metavar="HOST", help="host of node 0 (default: the first of Slurm's)")
    add("--address", metavar="IP", help="address of this node for the others (default: from --interface)")
    add("--interface", metavar="NAME", help="network of gloo, NCCL and Ray (default: on the route to the head)")
    add(
        "--port",
        type=positive(int),
        metavar="P",
        help="of node 0, which also takes free ones above it (default: by job)",
    )
    add(
        "--nproc-per-node",
        type=positive(int),
        metavar="N",
        help="trainer ranks (default: placement.trainer_gpus, else 1)",
    )
    add("--directory", type=Path, metavar="DIR", help="logs of the nodes (default: RUN.nodes, next to the run)")
    add("--token-file", type=Path, metavar="FILE", help="the job's secret, mode 0600 (default: DIR/token, made)")
    add(
        "--start-timeout",
        type=positive(float),
        default=300.0,
        metavar="S",
        help="deadline for all nodes (%(default)s s)",
    )
    add(
        "--after-loss",
        type=positive(float),
        default=60.0,
        metavar="S",
        help="until the trainer ends when a node is lost (%(default)s)",
    )
    add("--workdir", type=Path, metavar="DIR", help="go there first; relative paths of the configuration start there")
    add("--check", action="store_true", help="look at the nodes instead of training: exit status 0 or 2")
    add("--module", default="ctpo_megatron.train", help="what torchrun runs (%(default)s)")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
