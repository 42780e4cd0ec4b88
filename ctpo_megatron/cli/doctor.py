"""`ctpo doctor`: what is missing on this machine for training and for one configuration."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ctpo_megatron.base.text import say
from ctpo_megatron.checks import (
    Wanted,
    check_template,
    diagnose,
    diagnose_run,
    gpus,
    install_line,
    verdict,
    weight_bytes,
)
from ctpo_megatron.cli.console import print_table
from ctpo_megatron.cli.errors import UsageError
from ctpo_megatron.config import Job, Problem, failed, load_with_sources

HERE = "This machine"
STATUS = {"ok": "ok", "warning": "note", "missing": "missing", "error": "broken"}
"""Label of each severity in the table."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Check this machine. Exit status: 0 ready, 1 something is missing or broken, 2 wrong request."
    parser.add_argument("config", metavar="CONFIG", nargs="?", help="check for this configuration, too")
    parser.add_argument(
        "overrides", metavar="a.b=c", nargs="*", default=[], help="override a key of it, or all keys of a further file"
    )
    parser.add_argument("--model", metavar="DIR", type=Path, help="a model directory: is there memory for its weights?")
    parser.add_argument("--deep", action="store_true", help="let ranks of this machine exchange tensors, too")
    parser.add_argument(
        "--template",
        action="store_true",
        help="check the chat template of CONFIG alone: does an episode have the tokens that it writes?",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print tables or JSON, then the result; returns 1 if something that training needs is missing or broken."""
    if args.template:
        return _template(args)
    found, wanted = _of_config(args)
    if args.model is not None:
        wanted = replace(wanted, weight_bytes=weight_bytes(args.model))
    found[HERE] = diagnose(wanted, deep=args.deep)
    findings = [finding for part in found.values() for finding in part]
    if args.json:
        print(json.dumps(_as_json(found, findings), indent=1))
    else:
        _print(found, findings)
    return 1 if failed(findings) else 0


def _template(args: argparse.Namespace) -> int:
    """Show a prompt, a call and its answer; returns 1 if the tokens of an episode differ from the template's."""
    if args.config is None:
        raise UsageError("--template needs a configuration: ctpo doctor CONFIG --template")
    config, _ = load_with_sources(args.config, args.overrides)
    findings, parts = check_template(config)
    title = f"Chat template of {args.config}"
    if args.json:
        print(json.dumps({**_as_json({title: findings}, findings), "sample": dict(parts)}, indent=1))
    else:
        for name, text in parts:
            say(f"--- {name}\n{text}")
        _print({title: findings}, findings)
    return 1 if failed(findings) else 0


def _of_config(args: argparse.Namespace) -> tuple[dict[str, list[Problem]], Wanted]:
    if args.config is None:
        return {}, Wanted()
    unknown: list[Problem] = []
    config, sources = load_with_sources(args.config, args.overrides, unknown)
    seen = gpus()
    here = [] if isinstance(seen, str) else seen
    job = Job.here(config, cuda=bool(here), node_gpus=len(here))
    findings, wanted = diagnose_run(config, sources, job, here, earlier=unknown)
    return {f"Configuration {args.config}": findings}, wanted


def _as_json(found: Mapping[str, Sequence[Problem]], findings: Sequence[Problem]) -> dict[str, object]:
    return {
        "ready": not failed(findings),
        "verdict": verdict(findings),
        "to_do": list(dict.fromkeys(finding.fix for finding in failed(findings) if finding.fix)),
        "findings": {where: [_row(problem) for problem in part] for where, part in found.items()},
    }


def _row(problem: Problem) -> dict[str, str]:
    status = STATUS[problem.severity]
    rest = {"detail": problem.message, "fix": problem.fix, "extra": problem.extra}
    return {"name": problem.key, "status": status, **rest}


def _print(found: Mapping[str, Sequence[Problem]], findings: Sequence[Problem]) -> None:
    for where, part in found.items():
        rows = [(p.key, STATUS[p.severity], p.advice) for p in part]
        print_table(where, ("what", "status", "detail"), rows)
    print(f"\n{verdict(findings)}", flush=True)
    for finding in failed(findings):
        say(f"  {finding.key}: {finding.advice}", error=True)
    if line := install_line(findings):
        print(f"To install what is missing: {line}", file=sys.stderr)
