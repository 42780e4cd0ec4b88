"""`ctpo eval`: evaluates a model in Hugging Face format on held-out prompts, with engines alone."""

from __future__ import annotations

import argparse
import json
import logging
import re
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from ctpo_megatron.base.run_paths import step_name
from ctpo_megatron.base.stop import ENDING, heeded
from ctpo_megatron.base.text import log_to_terminal
from ctpo_megatron.checks import (
    DataValidation,
    check_extensions,
    check_libraries,
    temporary_problem,
    torch_has_cuda,
    validate_sampling,
    visible_gpus,
)
from ctpo_megatron.cli.console import print_warnings
from ctpo_megatron.cli.errors import UsageError
from ctpo_megatron.config import Config, Sources
from ctpo_sandbox import temporary

if TYPE_CHECKING:
    from rich.table import Table

    from ctpo_megatron.evaluate import Outcome, Target

_OVERRIDE = re.compile(r"[a-z_]+(\.[a-z0-9_]+)+=")
_STRICT = ("reward.function=math_verify", "reward.by_source={}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Evaluate a model: accuracies with intervals, by data source. Ended early, it can be resumed."
    parser.add_argument("model", type=Path, metavar="MODEL", help="model in Hugging Face format, or run directory")
    parser.add_argument("overrides", metavar="a.b=c", nargs="*", default=[], help="override a key of the configuration")
    parser.add_argument("--data", nargs="+", metavar="FILE", default=[], help="prompt files; default: data.eval")
    parser.add_argument("-k", "--samples", type=int, metavar="N", help="samples of each prompt; default: eval.samples")
    parser.add_argument("--temperature", type=float, metavar="T", help="of the samples; default: eval.temperature")
    parser.add_argument("--engines", type=int, metavar="N", help="default: as many as the GPUs hold; on a CPU 1")
    parser.add_argument(
        "--scorer",
        choices=("strict", "reference"),
        help="strict: math_verify, whatever the run's reward is; reference: also the published, lenient one",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="configuration; default: the configuration of MODEL's run"
    )
    where = "default: evaluations/MODEL-FILES; of a run RUN-STEP-FILES"
    parser.add_argument("--output", type=Path, metavar="DIR", help=where)


def run(args: argparse.Namespace) -> int:
    """Evaluate; returns 0 when every prompt was evaluated, 1 when some were left out."""
    from ctpo_megatron.evaluate import find_target, read_config

    if problem := temporary_problem():  # before the temporary directory becomes a longer one
        raise UsageError(str(problem))
    temporary.sweep()
    temporary.move_in()
    target = find_target(args.model, args.config)
    config, sources = read_config(target, _overrides(args), visible_gpus())
    _check(config, sources)
    data = "-".join(Path(file).stem for file in config.data.eval)
    named = [args.model.resolve().name, *([] if target.step is None else [step_name(target.step)]), data]
    outcome = _evaluate(config, args.output or Path("evaluations", "-".join(named)), args, target)
    _print(outcome)
    if outcome.no_verdict:
        what = f"{outcome.no_verdict} samples have no verdict and count neither as right nor as wrong"
        print(f"{what}; the same command tries them again", file=sys.stderr)
    if not outcome.left_out:
        return 0
    print(f"{len(outcome.left_out)} prompts are left out; the same command tries them again", file=sys.stderr)
    return 1


def _overrides(args: argparse.Namespace) -> list[str]:
    """Options as overrides of the configuration, the user's overrides last; --data takes all that follows it."""
    given: dict[str, Any] = {"eval.samples": args.samples, "eval.temperature": args.temperature}
    given["data.eval"] = [text for text in args.data if not _OVERRIDE.match(text)] or None
    given["rollout.engines"] = args.engines
    options = [f"{key}={json.dumps(value)}" for key, value in given.items() if value is not None]
    misplaced = [text for text in args.data if _OVERRIDE.match(text)]
    return [*(_STRICT if args.scorer else ()), *options, *args.overrides, *misplaced, *args.unknown]


def _check(config: Config, sources: Sources) -> None:
    if not config.data.eval:
        raise UsageError("nothing to evaluate on: give --data FILE")
    print_warnings(validate_sampling(config, cuda=torch_has_cuda(), sources=sources))
    check_extensions(config, sources)
    print_warnings(check_libraries(config.sandbox, config.rollout))


def _evaluate(config: Config, output: Path, args: argparse.Namespace, target: Target) -> Outcome:
    """target: a model that a run has trained is taught, whatever its prompts show."""
    from ctpo_megatron.environments import usable
    from ctpo_megatron.evaluate import evaluate
    from ctpo_megatron.tracking import Display

    log_to_terminal()
    logging.getLogger("ctpo_megatron").setLevel(logging.INFO)
    validation = DataValidation.of(config, output, taught=target.config is not None)
    validation.check_vocabulary()
    prompts = usable(validation.held_out())
    try:
        with _ended_by_signals(), Display(config.tracking.live, 0, title=f"ctpo eval {config.model.path}") as display:
            chosen = f" ({target.why})" if target.why else ""
            display.note(f"evaluating {config.model.path}{chosen}, writing to {output}")
            reference = args.scorer == "reference"
            return evaluate(config, prompts, validation.tokenizer, output, reference=reference, display=display)
    except SystemExit:
        advice = f"finished samples are in {output}, and the same command continues from them"
        print(f"the evaluation is MISSING: it was stopped; {advice}", file=sys.stderr)
        raise


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Turn the first stop signal into an exception, so that engines and sandbox are closed."""

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        for each in ENDING:
            signal.signal(each, signal.SIG_IGN)
        signal.alarm(0)  # Ray's handler, which called this one, would abort the process in 3 s
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in heeded()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print(outcome: Outcome) -> None:
    """Accuracies of every source by every scorer, then statistics of the answers."""
    from ctpo_megatron.base.terminal import Terminal

    found, console = outcome.results, Terminal(markup=False)
    groups = dict(found["sources"]) | ({"overall": found["overall"]} if len(found["sources"]) > 1 else {})
    console.print()
    console.print(_accuracies(groups, found["scorers"], found["samples_per_prompt"]))
    console.print()
    console.print(_response_statistics(groups))
    console.print()
    console.print(f"95 %: bootstrap interval over problems. All figures: {outcome.file}", soft_wrap=True)


def _accuracies(groups: Mapping[str, Any], scorers: Sequence[str], k: int) -> Table:
    others = [f"pass@{k}", f"maj@{k}", f"worst@{k}"] if k > 1 else []
    table = _table("source", "scorer", f"avg@{k}", "95 %", *others)
    for source, figures in groups.items():
        for scorer in scorers:
            average = figures[scorer][f"avg@{k}"]
            rest = [f"{figures[scorer][name]['value']:.3f}" for name in others]
            interval = f"{average['low']:.3f} to {average['high']:.3f}"
            table.add_row(source, scorer, f"{average['value']:.3f}", interval, *rest)
    return table


def _response_statistics(groups: Mapping[str, Any]) -> Table:
    table = _table("source", "problems", "samples", "response tokens", "tool use", "cut off")
    for source, figures in groups.items():
        shares = [f"{figures[name]:.3f}" for name in ("tool_use", "truncated")]
        counts = [f"{figures[name]:,}" for name in ("problems", "samples")]
        table.add_row(source, *counts, f"{figures['response_length_mean']:,.0f}", *shares)
    return table


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, justify="left" if column in ("source", "scorer") else "right", no_wrap=True)
    return table
