"""The `ctpo` command. Everything heavy is imported inside the verb that needs it, so `ctpo --help` is immediate."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ctpo_megatron.config import (
    Config,
    Plan,
    Problem,
    Split,
    TrainArgs,
    add_train_arguments,
    dump,
    facts_for,
    load_with_sources,
    memory_table,
    train_args,
    validate,
    world_size,
)
from ctpo_megatron.run.extensions import check_extensions

# Module (imported already if its error was raised): names of exceptions.
_USER_ERRORS = {  # their message is all the user needs
    "ctpo_megatron.config": ("ConfigError",),
    "ctpo_megatron.data": ("DataError",),
    "ctpo_megatron.extensions": ("ExtensionError",),
    "ctpo_megatron.run.directory": ("RunDirectoryError",),
    "ctpo_megatron.policy": ("CheckpointError",),
    "ctpo_megatron.rollout": ("ReplayError",),
    "ctpo_sandbox": ("SandboxUnavailable", "SandboxStartError"),
}
_FAILED_ELSEWHERE = {"ctpo_megatron.policy": ("RankZeroError",)}  # the rank that failed has the traceback


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `ctpo`; returns the exit status: 0 done, 1 failed, 2 the request was wrong."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _parser(with_sandbox_options=argv[:1] == ["sandbox"])
    namespace, unknown = parser.parse_known_args(argv)
    if unknown and (namespace.verb != "train" or not all("." in text or "=" in text for text in unknown)):
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    namespace.unknown = unknown
    try:
        return namespace.action(namespace)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return _report_error(error)


def run_train(args: TrainArgs) -> int:
    """Check everything, then train (or, with --dry-run, print what would run)."""
    config, sources = load_with_sources(args.config_path, args.overrides)
    cuda = args.assume_cuda if args.dry_run and args.assume_cuda else _cuda_available()
    warnings = validate(config, world_size=world_size(), cuda=cuda, sources=sources)
    check_extensions(config, sources)
    if _is_rank_zero():
        _print_warnings(warnings)
    if args.dry_run:
        if _is_rank_zero():
            _print_plan(config)
        return 0
    logging.basicConfig(format="%(message)s")
    logging.getLogger("ctpo_megatron").setLevel(logging.INFO if _is_rank_zero() else logging.WARNING)
    from ctpo_megatron.train import main as train

    return train(config)


def _parser(with_sandbox_options: bool = False) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ctpo", description="CTPO: reinforcement learning of tool-using models.")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)

    train = verbs.add_parser("train", help="train from a configuration file", description="Train with CTPO.")
    add_train_arguments(train)
    train.set_defaults(action=lambda args: run_train(train_args(args, args.unknown)))

    report = verbs.add_parser("report", help="rebuild the report of a run", description="Rebuild report.html.")
    report.add_argument("run", metavar="RUN", help="run directory, e.g. runs/quickstart")
    report.set_defaults(action=_report)

    doctor = verbs.add_parser("doctor", help="what is installed, what is missing", description="Check this machine.")
    doctor.set_defaults(action=_doctor)

    verify = verbs.add_parser(
        "verify",
        help="compare parallel layouts with a float64 oracle",
        description="Run one optimizer step under many layouts and compare loss, log-probs and the full gradient.",
    )
    verify.add_argument("--model", type=Path, help="Hugging Face directory, small; default: a tiny random model")
    verify.add_argument("--layouts", nargs="+", metavar="NAME", help="default: all that --max-ranks allows")
    verify.add_argument("--objective", nargs="+", default=["ctpo"], metavar="PRESET", help="presets, or: all")
    verify.add_argument("--max-ranks", type=int, metavar="N", help="default: GPUs; without any cores, at least 4")
    verify.add_argument("--tolerance", type=float, default=1e-5, help="of loss, log-probs (nats) and gradient")
    verify.set_defaults(action=_verify)

    export = verbs.add_parser(
        "export",
        help="write a checkpoint in Hugging Face format, or check one",
        description="Write the weights of a run or a checkpoint in Hugging Face format. Also under torchrun.",
    )
    export.add_argument("source", type=Path, metavar="SOURCE", help="run, checkpoint, or exported directory to check")
    export.add_argument(
        "--output", type=Path, metavar="DIR", help="default: RUN/model-step_NNNNNN; needed outside a run"
    )
    export.add_argument(
        "--model", type=Path, metavar="DIR", help="the model trained; default: as the run's config says"
    )
    export.add_argument("--check", action="store_true", help="compare with the Megatron model; exit 1 if it differs")
    export.add_argument("--tolerance", type=float, help="of a logit, relative to the largest; default: by precision")
    export.add_argument("--tensor-parallel", type=_positive, default=1, metavar="N", help="ranks sharing every layer")
    export.add_argument("--pipeline-parallel", type=_positive, default=1, metavar="N", help="ranks sharing the stack")
    export.set_defaults(action=_export)

    _add_sandbox(verbs, with_sandbox_options)
    return parser


def _add_sandbox(verbs: argparse._SubParsersAction[argparse.ArgumentParser], with_options: bool) -> None:
    sandbox = verbs.add_parser("sandbox", help="the code execution service", description="Code execution service.")
    actions = sandbox.add_subparsers(dest="sandbox_verb", metavar="VERB", required=True)
    serve = actions.add_parser("serve", help="serve until interrupted", description="Serve executions until ^C.")
    # The server's options need its package; they are added only when this verb is asked for.
    if with_options:
        importlib.import_module("ctpo_sandbox.server").add_arguments(serve)
    serve.set_defaults(action=_serve)
    smoke = actions.add_parser("smoke", help="check a server before a training job", description="Check a server.")
    smoke.add_argument("--url", required=True, help="address of the server")
    smoke.set_defaults(action=_smoke)
    bench = actions.add_parser("bench", help="executions per second of a server", description="Time a server.")
    bench.add_argument("--url", required=True, help="address of the server")
    bench.add_argument("--seconds", type=float, default=5.0, help="for each snippet at each concurrency")
    bench.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32], metavar="N")
    bench.set_defaults(action=_bench)


def _serve(args: argparse.Namespace) -> int:
    from ctpo_sandbox import server

    return server.run(args) or 0


def _verify(args: argparse.Namespace) -> int:
    from ctpo_megatron.objective import PRESETS
    from ctpo_megatron.policy import max_ranks
    from ctpo_megatron.verify import LAYOUTS, unsupported_layouts, verify

    objectives = list(PRESETS) if args.objective == ["all"] else args.objective
    for kind, names, known in (("layout", args.layouts or [], LAYOUTS), ("preset", objectives, PRESETS)):
        if unknown := sorted(set(names) - known.keys()):
            print(f"ctpo verify: unknown {kind} {', '.join(unknown)}; known: {', '.join(known)}", file=sys.stderr)
            return 2
    unfit = unsupported_layouts(args.model)
    if wrong := [name for name in args.layouts or [] if name in unfit]:
        for name in wrong:
            print(f"ctpo verify: {name} cannot run {args.model}: {unfit[name]}", file=sys.stderr)
        return 2
    limit = max_ranks() if args.max_ranks is None else args.max_ranks
    large = {name: f"more than {limit} ranks" for name, layout in LAYOUTS.items() if layout.ranks > limit}
    skipped = {} if args.layouts else large | unfit
    layouts = args.layouts or [name for name in LAYOUTS if name not in skipped]
    if not layouts:
        print(f"ctpo verify: --max-ranks {limit} leaves nothing to check; raise it", file=sys.stderr)
        return 2
    for reason in dict.fromkeys(skipped.values()):
        print(f"skipped: {', '.join(name for name in skipped if skipped[name] == reason)}: {reason}")
    print(f"{'layout':<25}{'objective':<14}{'ranks':>5}{'loss':>10}{'log_probs':>10}{'gradient':>10}  worst tensor")
    failed = total = 0
    for check in verify(args.model, layouts, objectives):
        good = check.passed(args.tolerance)
        failed, total = failed + (not good), total + 1
        figures = (
            f"{check.loss:>10.1e}{check.log_probs:>10.1e}{check.gradient:>10.1e}  {check.worst:.1e} {check.worst_name}"
        )
        verdict = "" if good else "  FAILED"
        row = f"{check.layout:<25}{check.objective:<14}{check.ranks:>5}{'' if check.problem else figures}{verdict}"
        print(row, *check.problem.splitlines(), sep="\n    ", flush=True)
    print(f"{total - failed} of {total} within {args.tolerance:g} of the float64 oracle")
    return 1 if failed else 0


def _positive(text: str) -> int:
    """Type of an argument; argparse reports the ValueError."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return number


def _export(args: argparse.Namespace) -> int:
    from ctpo_megatron.export import export, resolve

    request = resolve(args.source, args.model, args.output)
    if request.checkpoint is None and not args.check:
        print(f"ctpo export: {request.target} is exported already; --check compares it", file=sys.stderr)
        return 2
    findings = export(
        request,
        check=args.check,
        tolerance=args.tolerance,
        tensor_parallel=args.tensor_parallel,
        pipeline_parallel=args.pipeline_parallel,
    )
    if not _is_rank_zero():
        return 0
    if request.checkpoint is not None:
        print(f"wrote {request.target} from {request.checkpoint}")
    if findings is None:
        return 0
    rows = [(finding.what, "ok" if finding.good else "FAILED", finding.detail) for finding in findings]
    _print_table(f"Check of {request.target}", ("what", "status", "detail"), rows)
    return 0 if all(finding.good for finding in findings) else 1


def _smoke(args: argparse.Namespace) -> int:
    from ctpo_sandbox import smoke

    return smoke.run(args.url)


def _bench(args: argparse.Namespace) -> int:
    from ctpo_sandbox import bench

    return bench.run(args.url, args.seconds, args.concurrency)


def _report(args: argparse.Namespace) -> int:
    from ctpo_megatron.tracking import print_summary, write_report

    run = Path(args.run)
    if not (run / "config.yaml").is_file():
        print(f"ctpo: {run} is not a run directory: it has no config.yaml", file=sys.stderr)
        return 2
    print_summary(run)
    print(write_report(run))
    return 0


def _doctor(_: argparse.Namespace) -> int:
    from ctpo_megatron.config.doctor import diagnose, failed, has_cuda, install_line

    findings = diagnose()
    rows = [(f.name, f.status, f"{f.detail}; {f.fix}" if f.fix else f.detail) for f in findings]
    _print_table("This machine", ("what", "status", "detail"), [*rows, *_sandbox_rows()])
    if not failed(findings):
        return 0
    print(f"\nTo install what is missing: {install_line(findings, has_cuda(findings))}", file=sys.stderr)
    return 1


def _sandbox_rows() -> list[tuple[str, str, str]]:
    """What the sandbox enforces here, by starting one and asking it."""
    try:
        from ctpo_sandbox import SandboxStartError, start_server
    except ImportError as error:
        return [("sandbox", "note", f"does not import: {error}")]
    with tempfile.TemporaryDirectory() as folder:
        options = {"slots": 1, "memory_mb": 512, "max_run_timeout_s": 5, "start_timeout_s": 60}
        try:
            with start_server(**options, log_path=Path(folder) / "sandbox.log") as server:
                health = server.health
        except SandboxStartError as error:
            return [("sandbox", "note", f"does not start: {error}")]
    return [
        ("sandbox", "ok", "; ".join(health["enforced"])),
        ("  not enforced", "note", "; ".join(health["not_enforced"])),
    ]


def _print_plan(config: Config) -> None:
    print(dump(config), end="", flush=True)
    for title, rows in Plan.of(config, world_size()).tables().items():
        _print_table(title, ("", "value", "from"), rows)
    memory = memory_table(facts_for(config), Split.of(config.policy, world_size()))
    _print_table("Memory per trainer rank on CUDA, at most", ("", "size", "from"), memory)


def _print_table(title: str, header: tuple[str, str, str], rows: Sequence[tuple[str, str, str]]) -> None:
    """A table on a terminal, aligned plain lines in a file or a log."""
    console = Console()
    if console.is_terminal:
        table = Table(*header, title=title, title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print()
        console.print(table)
        return
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    print(f"\n{title}")
    for first, second, third in rows:
        print(f"  {first:<{widths[0]}}  {second:>{widths[1]}}  {third}".rstrip())


def _print_warnings(warnings: Sequence[Problem]) -> None:
    for problem in warnings:
        print(f"warning: {problem}", file=sys.stderr)


def _report_error(error: Exception) -> int:
    if _is_one_of(error, _FAILED_ELSEWHERE):
        print(f"ctpo: {error}", file=sys.stderr)
        return 1
    if not _is_one_of(error, _USER_ERRORS):
        traceback.print_exception(error)
        return 1
    if _is_rank_zero():  # one message per cause, not one per rank
        print(f"ctpo: {error}", file=sys.stderr)
    return 2


def _is_one_of(error: Exception, kinds_of: Mapping[str, tuple[str, ...]]) -> bool:
    """By class object, from modules that are loaded: a module that is not cannot have raised anything."""
    for module, names in kinds_of.items():
        loaded = sys.modules.get(module)
        kinds = tuple(kind for name in names if isinstance(kind := getattr(loaded, name, None), type))
        if isinstance(error, kinds):
            return True
    return False


def _is_rank_zero() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _cuda_available() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    sys.exit(main())
