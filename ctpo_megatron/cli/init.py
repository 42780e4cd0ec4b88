"""`ctpo init`: a configuration for a model, a data file and reward functions of one's own, on stdout."""

from __future__ import annotations

import argparse
from pathlib import Path

from ctpo_megatron.base.text import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write a configuration to stdout. A data file with other columns becomes data/<stem>.parquet here."
    )
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="model in Hugging Face format")
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="prompts and answers, any columns")
    parser.add_argument(
        "--reward",
        action="append",
        default=[],
        metavar="FILE.py:NAME[=WEIGHT]",
        help="a reward function of TRL's, verl's or our form; several are added up; default: math_verify",
    )
    parser.add_argument(
        "--from",
        dest="job",
        type=Path,
        metavar="JOB",
        help="a job of TRL or verl, with its defaults: JSON, YAML, a script with GRPOConfig(...) or with overrides of "
        "verl; no script is run",
    )


def run(args: argparse.Namespace) -> int:
    """Print the configuration; what was found and chosen goes to stderr."""
    from ctpo_megatron.init import make_job

    made = make_job(args.model, args.data, args.reward, args.job)
    say(*(f"# {line}" for line in made.lines), error=True)
    print(made.text, end="")
    return 0
