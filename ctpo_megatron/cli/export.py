"""`ctpo export`: writes a checkpoint as a Hugging Face directory, or checks one. Also under torchrun."""

from __future__ import annotations

import argparse
from pathlib import Path

from ctpo_megatron.cli.console import print_table
from ctpo_megatron.cli.errors import UsageError, is_rank_zero
from ctpo_sandbox.arguments import positive


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Write the weights of a run or a checkpoint in Hugging Face format. Also under torchrun."
    parser.add_argument("source", type=Path, metavar="SOURCE", help="run, checkpoint, or exported directory to check")
    parser.add_argument("--step", type=int, metavar="N", help="of a run: the checkpoint; default: the newest")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="default: RUN/model-step_NNNNNN; needed outside a run"
    )
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="the model trained; default: as the run's config says"
    )
    parser.add_argument("--check", action="store_true", help="compare with the Megatron model; exit 1 if it differs")
    parser.add_argument("--tolerance", type=positive(float), help="of a log-prob (nats); default: by precision")
    parser.add_argument(
        "--tensor-parallel", type=positive(int), default=1, metavar="N", help="ranks sharing every layer"
    )
    parser.add_argument(
        "--pipeline-parallel", type=positive(int), default=1, metavar="N", help="ranks sharing the stack"
    )


def run(args: argparse.Namespace) -> int:
    """Export, check, or both; returns 1 if the check finds a difference."""
    from ctpo_megatron.export import export, resolve

    request = resolve(args.source, args.model, args.output, step=args.step)
    if request.checkpoint is None and not args.check:
        raise UsageError(f"{request.target} is exported already; --check compares it")
    findings = export(
        request,
        check=args.check,
        tolerance=args.tolerance,
        tensor_parallel=args.tensor_parallel,
        pipeline_parallel=args.pipeline_parallel,
    )
    if not is_rank_zero():
        return 0
    if request.checkpoint is not None:
        print(f"wrote {request.target} from {request.checkpoint}")
    if findings is None:
        return 0
    rows = [(finding.what, "ok" if finding.good else "FAILED", finding.detail) for finding in findings]
    print_table(f"Check of {request.target}", ("what", "status", "detail"), rows)
    return 0 if all(finding.good for finding in findings) else 1
