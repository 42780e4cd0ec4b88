"""Command-line arguments of training, shared by `ctpo train` and `python -m ctpo_megatron.train` under torchrun."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class TrainArgs:
    """A configuration file, dotted overrides, and whether to stop after the checks."""

    config_path: str
    overrides: tuple[str, ...] = ()
    dry_run: bool = False
    assume_cuda: bool = False


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of training on a parser."""
    parser.add_argument("config", metavar="CONFIG", help="YAML file; also looked for in configs/ of the checkout")
    parser.add_argument("overrides", metavar="a.b=c", nargs="*", help="override a key, e.g. policy.optimizer.lr=1e-6")
    parser.add_argument("--dry-run", action="store_true", help="check everything, print what would run, start nothing")
    parser.add_argument(
        "--cuda", action="store_true", help="with --dry-run: check as for a CUDA machine, even if this one has no GPU"
    )


def train_args(namespace: argparse.Namespace, unknown: Sequence[str] = ()) -> TrainArgs:
    """Arguments as a record. Unknown ones join the overrides, whose reader says how to spell them."""
    overrides = (*namespace.overrides, *unknown)
    return TrainArgs(namespace.config, overrides, namespace.dry_run, namespace.cuda)


def parse_train_args(argv: Sequence[str], prog: str = "ctpo train") -> TrainArgs:
    """Parse the arguments of `ctpo train` (without the words `ctpo train`)."""
    parser = argparse.ArgumentParser(prog=prog, description="Train with CTPO.")
    add_train_arguments(parser)
    # Options may stand between overrides, which plain parse_args refuses.
    return train_args(*split_unknown(parser, argv))


def split_unknown(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse, and keep unknown `a.b=c`-like arguments; any other unknown argument is an error."""
    namespace, unknown = parser.parse_known_args(argv)
    strange = [text for text in unknown if "." not in text and "=" not in text]
    if strange:
        parser.error(f"unrecognized arguments: {' '.join(strange)}")
    return namespace, unknown


def world_size() -> int:
    """Ranks of this job: WORLD_SIZE as torchrun sets it, else 1."""
    return int(os.environ.get("WORLD_SIZE", "1"))
