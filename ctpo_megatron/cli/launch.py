"""`ctpo launch`: submit a job to a cluster, in an environment of the launcher's own."""

from __future__ import annotations

import argparse

from ctpo_launchers import environment, launch
from ctpo_megatron.cli.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments, which the launcher reads again."""
    launch.add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Never returns where the environment can be made: this process becomes the launcher."""
    try:
        return environment.launch(launch.as_words(args))
    except environment.NoEnvironment as error:
        raise UsageError(str(error)) from error
