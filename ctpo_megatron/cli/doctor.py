"""`ctpo doctor`: what is installed, what is missing, and what the sandbox enforces on this machine."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from ctpo_megatron.cli.console import print_table
from ctpo_megatron.config import doctor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.description = "Check this machine."
    parser.add_argument(
        "--model", metavar="DIR", type=Path, help="a model directory: is there shared memory for its weights?"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print a table; 1 if something that training needs is missing or broken."""
    findings = doctor.diagnose(args.model)
    rows = [(f.name, f.status, f"{f.detail}; {f.fix}" if f.fix else f.detail) for f in findings]
    print_table("This machine", ("what", "status", "detail"), [*rows, *sandbox_rows()])
    if not doctor.failed(findings):
        return 0
    missing = doctor.install_line(findings, doctor.has_cuda(findings))
    print(f"\nTo install what is missing: {missing}", file=sys.stderr)
    return 1


def sandbox_rows() -> list[tuple[str, str, str]]:
    """What the sandbox enforces here, by starting one and asking it."""
    try:
        from ctpo_sandbox import Limits, SandboxStartError, start_server
    except ImportError as error:
        return [("sandbox", "note", f"does not import: {error}")]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "sandbox.log"
        try:
            with start_server(slots=1, limits=Limits(run_timeout_s=5), start_timeout_s=60, log_path=log) as server:
                health = server.health
        except SandboxStartError as error:
            return [("sandbox", "note", f"does not start: {error}")]
    return [
        ("sandbox", "ok", "; ".join(health["enforced"])),
        ("  not enforced", "note", "; ".join(health["not_enforced"])),
    ]
