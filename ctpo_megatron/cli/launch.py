"""`ctpo launch`: submits a job to a cluster, in the launcher's own environment."""

from __future__ import annotations

import argparse

from ctpo_launchers import LaunchError, environment, launch
from ctpo_megatron.cli.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments, which the launcher parses again."""
    launch.add_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replace this process by the launcher; returns only if its environment cannot be created."""
    try:
        return environment.launch(launch.as_words(args))
    except LaunchError as error:
        raise UsageError(str(error)) from error
