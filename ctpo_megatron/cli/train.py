"""`ctpo train`: check everything, then train; with --dry-run, print what would run."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING

from ctpo_megatron.base.cuda_environment import order_kernels
from ctpo_megatron.base.ray_environment import ADDRESS
from ctpo_megatron.base.stop import TRY_AGAIN, stop_signal
from ctpo_megatron.base.text import log_to_terminal, redacted_words, say
from ctpo_megatron.checks import (
    ROWS,
    check_dry,
    check_start,
    has_cuda_device,
    play_first,
    temporary_problem,
    torch_cuda,
    torch_has_cuda,
    visible_gpus,
)
from ctpo_megatron.cli.console import print_warnings
from ctpo_megatron.cli.dry_run import print_data, print_plan, print_trajectory
from ctpo_megatron.cli.errors import UsageError, is_rank_zero
from ctpo_megatron.config import (
    Config,
    Job,
    Problem,
    Sources,
    accepted,
    load_with_sources,
    needs_engines,
    rank_problem,
    read_shapes,
    spec_for,
)
from ctpo_megatron.models import ModelSpec
from ctpo_megatron.plan import CARD_GIB, USUAL_CARD
from ctpo_sandbox import temporary
from ctpo_sandbox.arguments import positive
from ctpo_sandbox.isolation.libc import die_with_parent

if TYPE_CHECKING:
    from ctpo_megatron.engines import RayRuntime

_STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGINT, TRY_AGAIN)
_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Variable that torchrun gives its ranks."""
_OF_ONE_START = ("run.resume=", "run.overwrite=", "run.deadline=", "data.rerender=")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of training, the same under `python -m ctpo_megatron.train`."""
    parser.description = "Train with CTPO."
    parser.add_argument("config", metavar="CONFIG", help="YAML file; also looked for in configs/ of the checkout")
    parser.add_argument(
        "overrides",
        metavar="a.b=c",
        nargs="*",
        default=[],
        help="override a key, e.g. policy.optimizer.lr=1e-6, or all keys of a further YAML file; the last one wins",
    )
    parser.add_argument("--dry-run", action="store_true", help="check everything, print what would run, start nothing")
    parser.add_argument(
        "--cuda", action="store_true", help="with --dry-run: check as for a CUDA machine, even if this one has no GPU"
    )
    parser.add_argument(
        "--gpu",
        choices=CARD_GIB,
        help=f"with --dry-run: as --cuda, with the memory of this card ({USUAL_CARD})",
    )
    parser.add_argument(
        "--gpu-gib",
        type=positive(float),
        metavar="N",
        help="with --dry-run: as --cuda, with this memory of a GPU",
    )
    parser.add_argument(
        "--shapes",
        metavar="FILE",
        help="with --dry-run: plan with this config.json, or one of configs/models by name; no model or prompt files",
    )
    parser.add_argument(
        "--full", action="store_true", help=f"with --dry-run: check all rows of the data, not {ROWS} of each file"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="with --dry-run: all keys, tables and texts")


def run(args: argparse.Namespace) -> int:
    """Check the configuration against this machine, then train or print the plan."""
    here = None if args.dry_run else temporary_problem()
    if problem := rank_problem(planned=args.dry_run) or here:
        raise UsageError(str(problem))  # not a ConfigError, which only rank 0 shows
    unknown: list[Problem] = []
    config, sources = load_with_sources(args.config, [*args.overrides, *args.unknown], unknown)
    if not args.dry_run:
        _settle()
    if not args.dry_run and config.policy.tensor_model_parallel_size > 1 and torch_cuda():
        order_kernels()  # before anything asks CUDA for its devices
    planned = args.cuda or args.gpu is not None or args.gpu_gib is not None
    cuda = (planned or has_cuda_device()) if args.dry_run else has_cuda_device() and torch_has_cuda()
    elsewhere = args.dry_run or bool(os.environ.get(ADDRESS))  # a named cluster has its own GPUs
    node_gpus = None if elsewhere else visible_gpus() if cuda else 0
    job = Job.here(config, cuda=cuda, node_gpus=node_gpus, planned=args.dry_run)
    shapes = _shapes(args)
    if args.dry_run:
        return _dry_run(args, config, sources, job, shapes, unknown) if is_rank_zero() else 0
    warnings = accepted([*unknown, *check_start(config, sources, job, disk=is_rank_zero())])
    if is_rank_zero():
        print_warnings(warnings)
    log_to_terminal()
    logging.getLogger("ctpo_megatron").setLevel(logging.INFO if is_rank_zero() else logging.WARNING)
    stop = stop_signal(config.run.deadline, config.checkpoint.grace_s)
    try:
        with _ray_first(config, cuda) as ray:
            from ctpo_megatron.train import main  # which takes seconds

            status = main(config, stop, ray)
    except SystemExit as ended:  # stopped while there was nothing to save
        status = ended.code if isinstance(ended.code, int) else 1
    if status in _STOPPED and is_rank_zero():
        with suppress(OSError):  # the terminal may be closed
            print(f"continue with: {_resume_command(args)}", file=sys.stderr)
    return status


def _ray_first(config: Config, cuda: bool) -> AbstractContextManager[RayRuntime | None]:
    """Begin to start the engines' Ray on rank zero of a run on CPUs. On CUDA it depends on the trainer's GPUs."""
    if cuda or not is_rank_zero() or ADDRESS in os.environ or config.cluster.nodes > 1 or not needs_engines(config):
        return nullcontext()
    from ctpo_megatron.engines import begin_ray

    return begin_ray(config)


def _settle() -> None:
    """Before anything imports a library that makes temporary files."""
    temporary.sweep()
    temporary.move_in()
    if _TORCHRUN in os.environ:  # or this rank would stay when torchrun is killed
        die_with_parent(os.getppid(), signal.SIGTERM)


def _dry_run(
    args: argparse.Namespace,
    config: Config,
    sources: Sources,
    job: Job,
    shapes: ModelSpec | None,
    unknown: Sequence[Problem],
) -> int:
    rows = None if args.full else ROWS
    gpu_gib = args.gpu_gib or CARD_GIB[args.gpu or USUAL_CARD]
    found, data = check_dry(config, sources, job, gpu_gib=gpu_gib, shapes=shapes, rows=rows)
    print_warnings(accepted([*unknown, *found]))
    print_plan(config, job, shapes or spec_for(config), gpu_gib, verbose=args.verbose)
    print_data(data, full=args.full)
    if data.first is not None:  # nothing else is wrong
        first = play_first(config, *data.first)
        print_trajectory([("prompt", data.first_prompt), *first.parts], verbose=args.verbose)
        print_warnings(accepted(map(sources.placed, first.problems)))
    if not args.verbose:
        say("\nNo problems found. -v: all keys, tables and texts")
    return 0


def _resume_command(args: argparse.Namespace) -> str:
    """The command that resumes the run; options of torchrun are unknown here."""
    program = "torchrun ... -m ctpo_megatron.train" if _TORCHRUN in os.environ else "ctpo train"
    kept = [text for text in [*args.overrides, *args.unknown] if not text.startswith(_OF_ONE_START)]
    return f"{program} {shlex.join(redacted_words([args.config, *kept, 'run.resume=auto']))}"


def _shapes(args: argparse.Namespace) -> ModelSpec | None:
    """The model that a dry run plans with instead of the configured one."""
    if args.shapes is None:
        return None
    if not args.dry_run:
        raise UsageError("--shapes is for --dry-run: a run needs the model itself")
    return read_shapes(args.shapes)
