"""`ctpo launch`: submits a job to a cluster, in the launcher's own environment."""

from __future__ import annotations

import argparse

from ctpo_launchers import LaunchError, environment, launch
from ctpo_launchers.command import COMMANDS
from ctpo_launchers.jobs import of_the_launch
from ctpo_megatron.checks import check_dry, has_cuda_device
from ctpo_megatron.cli import parse
from ctpo_megatron.cli.console import print_warnings
from ctpo_megatron.cli.errors import UsageError
from ctpo_megatron.config import ConfigError, Job, Problem, accepted, load_with_sources

_NO_CHECK = "nothing was submitted; --no-check submits without these checks, as where the files are on the nodes alone"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments, which the launcher parses again."""
    launch.add_arguments(parser)
    parser.add_argument("--no-check", action="store_true", help="submit without the checks of a dry run")


def run(args: argparse.Namespace) -> int:
    """Replace this process by the launcher; returns only if its environment cannot be created.

    Raises UsageError for a job that its nodes would refuse, unless `--no-check`; ConfigError for a bad configuration.
    """
    try:
        environment.need_checkout()
        if args.config in COMMANDS:
            parse([args.config, *args.overrides])  # what the command would refuse is refused here
        elif args.config not in launch.ASKING and not args.no_check:
            _check(args)
        return environment.launch(launch.as_words(args))
    except LaunchError as error:
        raise UsageError(str(error)) from error


def _check(args: argparse.Namespace) -> None:
    """What every rank of the job would check, and the data: here, before the job waits in a queue."""
    cluster = launch.cluster_of(args)
    words = [*args.overrides, *args.unknown, *of_the_launch(args.nodes)]
    unknown: list[Problem] = []
    config, sources = load_with_sources(args.config, words, unknown)
    cuda = has_cuda_device() if cluster.executor == "local" else cluster.gpus_per_node is not None
    ranks = config.placement.trainer_gpus or 1  # of a node, as its program starts them
    job = Job(ranks * args.nodes, ranks, cluster.gpus_per_node, cuda)
    found, _ = check_dry(config, sources, job, gpu_gib=cluster.gpu_gib)
    try:
        print_warnings(accepted([*unknown, *found]))
    except ConfigError as error:
        raise UsageError(f"{error}\n{_NO_CHECK}") from error
