"""`ctpo train`: check everything, then train; with --dry-run, print what would run."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from ctpo_megatron.base.cuda_environment import order_kernels
from ctpo_megatron.base.ray_environment import ADDRESS
from ctpo_megatron.base.ray_orphans import end_orphans
from ctpo_megatron.base.stop import TRY_AGAIN
from ctpo_megatron.base.text import log_to_terminal, redacted_words, say
from ctpo_megatron.cli.console import print_table, print_warnings
from ctpo_megatron.cli.errors import UsageError, is_rank_zero
from ctpo_megatron.config import (
    CARD_GIB,
    USUAL_CARD,
    Config,
    CpuCache,
    DataConfig,
    Job,
    Problem,
    RolloutConfig,
    Sources,
    dump,
    dump_differences,
    free_memory,
    load_with_sources,
    rank_problem,
    read_shapes,
    resolved_objective,
    spec_for,
)
from ctpo_megatron.environments import system_prompt
from ctpo_megatron.models import ModelSpec
from ctpo_megatron.preflight import (
    ROWS,
    START_CHECKS,
    DataCheck,
    GpuMemory,
    check_dry,
    check_start,
    choice_table,
    crash_line,
    disk_table,
    disk_use,
    has_cuda_device,
    held_out_prompts,
    host_table,
    memory_table,
    plan_tables,
    play_first,
    prefix_note,
    run_checks,
    settled,
    torch_cuda,
    torch_has_cuda,
    visible_gpus,
    warnings_of,
)
from ctpo_sandbox import temporary
from ctpo_sandbox.arguments import positive
from ctpo_sandbox.libc import die_with_parent

_STOPPED = (128 + signal.SIGTERM, 128 + signal.SIGINT, TRY_AGAIN)
_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""Variable that torchrun gives its ranks."""
_HEAD = 2000
"""Characters of the prompt that a dry run shows."""
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
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="with --dry-run: all keys, not those alone that have other values"
    )


def run(args: argparse.Namespace) -> int:
    """Check the configuration against this machine, then train or print the plan."""
    here = [] if args.dry_run else run_checks(START_CHECKS, None)
    if problem := rank_problem(planned=args.dry_run) or next(iter(here), None):
        raise UsageError(str(problem))  # not a ConfigError, which only rank 0 shows
    unknown: list[Problem] = []
    config, sources = load_with_sources(args.config, [*args.overrides, *args.unknown], unknown)
    if not args.dry_run:
        _settle()
    if not args.dry_run and config.policy.tensor_model_parallel_size > 1 and torch_cuda():
        order_kernels()  # before anything asks CUDA for its devices
    planned = args.cuda or args.gpu is not None or args.gpu_gib is not None
    cuda = (planned or has_cuda_device()) if args.dry_run else torch_has_cuda()
    elsewhere = args.dry_run or bool(os.environ.get(ADDRESS))  # a named cluster has its own GPUs
    # A run without torchrun is of one rank, whatever is configured: `check_placement` says so.
    asked = cuda and args.dry_run
    job = Job.here(config, cuda=asked, node_gpus=None if elsewhere else visible_gpus())
    shapes = _shapes(args)
    if args.dry_run:
        return _dry_run(args, config, sources, job, cuda, shapes, unknown) if is_rank_zero() else 0
    found = check_start(config, sources, job, cuda=cuda, disk=is_rank_zero())
    found.raise_if_any(unknown)
    if is_rank_zero():
        print_warnings(found.warnings)
    log_to_terminal()
    logging.getLogger("ctpo_megatron").setLevel(logging.INFO if is_rank_zero() else logging.WARNING)
    from ctpo_megatron.train import main

    try:
        status = main(config)
    except SystemExit as ended:  # stopped while there was nothing to save
        status = ended.code if isinstance(ended.code, int) else 1
    if status in _STOPPED and is_rank_zero():
        with suppress(OSError):  # the terminal may be closed
            print(f"continue with: {_resume_command(args)}", file=sys.stderr)
    return status


def _settle() -> None:
    """Before anything imports a library that makes temporary files."""
    temporary.sweep()
    end_orphans()
    temporary.move_in()
    if _TORCHRUN in os.environ:  # or this rank would stay when torchrun is killed
        die_with_parent(os.getppid(), signal.SIGTERM)


def _dry_run(
    args: argparse.Namespace,
    config: Config,
    sources: Sources,
    job: Job,
    cuda: bool,
    shapes: ModelSpec | None,
    unknown: Sequence[Problem],
) -> int:
    rows = None if args.full else ROWS
    gpu_gib = args.gpu_gib or CARD_GIB[args.gpu or USUAL_CARD]
    found, data = check_dry(config, sources, job, cuda=cuda, gpu_gib=gpu_gib, shapes=shapes, rows=rows)
    found.raise_if_any(unknown)
    print_warnings(found.warnings)
    spec = shapes or spec_for(config)
    _print_config(config, args.verbose)
    say(f"\n{resolved_objective(config.objective)['summary']}")
    say(f"prefixes: {prefix_note(config, cuda=cuda)} (policy.share_prefixes: {config.policy.share_prefixes})")
    _print_plan(config, job, spec)
    if cuda:
        if choice := choice_table(config, job, spec, gpu_gib):
            print_table("policy.micro_batch_tokens and policy.recompute", ("auto", "", "cost"), choice)
        _print_gpus(settled(config, job, spec, gpu_gib), job, gpu_gib, spec)
    else:
        _print_engines(config, spec)
    about = "Memory of a node's host, about" if cuda else "Memory of a node on a CPU, about"
    print_table(about, ("", "size", "from"), host_table(config, job, spec, cuda=cuda))
    _print_data(data, args.full)
    _play_first(config, data, sources)
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


def _print_data(data: DataCheck, full: bool) -> None:
    if data.not_checked:
        say(f"\ndata and chat template: not checked ({data.not_checked})")
        return
    rows = "all rows" if full else f"the first {ROWS:,} rows of each file; --full: all"
    print_table(f"Data: {rows}", ("", "", ""), data.table)
    head = data.first_prompt[:_HEAD]
    say(f"\nThe first prompt, as the model sees it\n{head}{' ...' if len(data.first_prompt) > _HEAD else ''}")


def _play_first(config: Config, data: DataCheck, sources: Sources) -> None:
    """Play the first trajectory, now that nothing else is wrong, and show it. Raises ConfigError."""
    if data.first is None:
        return
    found = play_first(config, *data.first)
    if found.parts:
        print("\nThe first trajectory, with a model from a script")
    for title, text in found.parts:
        say(f"[{title}] {text[:_HEAD]}{' ...' if len(text) > _HEAD else ''}")
    print_warnings(warnings_of(found.problems, sources))


def _print_config(config: Config, verbose: bool) -> None:
    text = dump(config) if verbose else f"# Unlike the defaults; -v shows all keys.\n{dump_differences(config)}"
    say(text.rstrip("\n"))


def _print_plan(config: Config, job: Job, spec: ModelSpec) -> None:
    for title, rows in plan_tables(config, job.world_size).items():
        print_table(title, ("", "value", "from"), rows)
    disk = disk_table(disk_use(config, spec, held_out_prompts(config)))
    print_table(f"What is written to {config.run.directory}, expected", ("", "size", "from"), disk)
    say(crash_line(config, spec))
    _print_system_prompt(config.data, config.rollout)


def _print_gpus(config: Config, job: Job, gpu_gib: float, spec: ModelSpec) -> None:
    memory = GpuMemory(config, job, spec, gpu_gib)
    of_rank = memory_table(spec, memory.split, gpu_gib)
    print_table("Memory per trainer rank on CUDA, at most", ("", "size", "from"), of_rank)
    print_table(f"Memory of each GPU on CUDA, {config.placement.mode}", ("", "size", "of whom"), memory.table())


def _print_engines(config: Config, spec: ModelSpec) -> None:
    cache = CpuCache.of(config, spec, free_memory())
    why = "rollout.engine.kv_cache_mb" if config.rollout.engine.kv_cache_mb else str(cache)
    print_table("Engines on a CPU", ("", "size", "from"), [("KV cache of each", f"{cache.mb:,} MiB", why)])


def _print_system_prompt(data: DataConfig, rollout: RolloutConfig) -> None:
    prompt = system_prompt(data, rollout)
    source = "data.system_prompt" if prompt.chosen else f"rollout.tool_parser: {rollout.tool_parser}"
    print(f"\nSystem prompt ({source})")
    for line in (prompt.text or "none").splitlines():
        say(f"  {line}".rstrip())
