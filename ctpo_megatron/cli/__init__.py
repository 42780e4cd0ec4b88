"""The `ctpo` command: one module per verb, imported only for that verb, so that `ctpo --help` is fast."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import platform
import sys
from collections.abc import Sequence
from typing import Any

from ctpo_megatron import __version__
from ctpo_megatron.cli.errors import flush_output, report_error

VERBS = {
    "init": "write a configuration for a model and a data file of your own",
    "train": "train from a configuration file",
    "sweep": "train with every configuration of a grid",
    "eval": "evaluate a model on held-out prompts",
    "launch": "submit a job to a cluster",
    "report": "rebuild the report of a run, or write a page of chosen trajectories",
    "compare": "several runs on one page",
    "doctor": "what is installed, what is missing",
    "verify": "compare parallel layouts with a float64 oracle",
    "export": "write a checkpoint in Hugging Face format, or check one",
    "sandbox": "the code execution service",
}
"""Verb -> its line in `ctpo --help`. The module of that name has `add_arguments`, and `run` for them."""


_OVERRIDABLE = ("train", "sweep", "eval", "launch")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `ctpo`; returns the exit status: 0 success, 1 failure, 2 invalid request."""
    argv = sys.argv[1:] if argv is None else list(argv)
    # OpenMP reads it when torch is imported. Threads that spin while they wait take the cores of whatever else runs.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        os.getcwd()
    except FileNotFoundError:
        print("ctpo: the current directory was deleted; change to an existing directory", file=sys.stderr)
        return 2
    try:
        args = parse(argv)
        status = int(args.run(args))
        flush_output()
        return status
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return report_error(error, argv[0])  # without a verb `parse` has ended


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a command line of `ctpo`; ends the process with status 2 for what no verb takes."""
    parser = _parser(verb=argv[0] if argv else "")
    if argv and argv[0] not in VERBS and not argv[0].startswith("-"):
        _refuse_removed(parser, argv[0])
        near = difflib.get_close_matches(argv[0], VERBS, 1)
        advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(VERBS)}"
        parser.error(f"no verb {argv[0]!r}; {advice}")
    args, unknown = parser.parse_known_args(argv)
    for text in unknown:
        _refuse_removed(parser, args.verb, text.partition("=")[0])
    if unknown and not (args.verb in _OVERRIDABLE and all("." in text or "=" in text for text in unknown)):
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if "run" not in args:
        parser.error("the verb comes first")
    args.unknown = unknown  # overrides that look like options: the parser of overrides explains the spelling
    return args


def _refuse_removed(parser: argparse.ArgumentParser, verb: str, option: str = "") -> None:
    """End the process with status 2 for a verb, or an option of one, that an earlier version had."""
    from ctpo_megatron.config import command_advice

    if (instead := command_advice(verb, option)) is not None:
        parser.error(f"{' '.join(filter(None, (verb, option)))} was removed: {instead}")


def _parser(verb: str) -> argparse.ArgumentParser:
    """A parser with all verbs, and the arguments of one."""
    parser = argparse.ArgumentParser(prog="ctpo", description="CTPO: reinforcement learning of tool-using models.")
    parser.add_argument("--version", action=_Version, nargs=0, help="version of this program, its commit and Python")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, summary in VERBS.items():
        arguments = verbs.add_parser(name, help=summary)
        if name == verb:
            module = importlib.import_module(f"ctpo_megatron.cli.{name}")
            module.add_arguments(arguments)
            if hasattr(module, "run"):  # `sandbox` has one for each of its own verbs
                arguments.set_defaults(run=module.run)
    return parser


class _Version(argparse.Action):
    """Print what a bug report needs, and end."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from ctpo_megatron.run import commit_of_code

        commit = commit_of_code()
        where = f"commit {commit}, " if commit else ""
        print(f"ctpo-megatron {__version__}, {where}Python {platform.python_version()}")
        parser.exit()
