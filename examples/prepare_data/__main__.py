"""`python -m examples.prepare_data RAW --output FILE`: makes a prompt file, and reports the problems it drops."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import yaml

from ctpo_megatron.base.text import say
from ctpo_megatron.checks import check_prompt_file
from ctpo_megatron.config import (
    RewardConfig,
    failed,
)
from ctpo_megatron.data import DataError, Prompt, marked_messages, token_ids
from ctpo_megatron.environments import TokenizerError, read_tokenizer, template_problem
from ctpo_megatron.rewards import in_words, shown_words, unverifiable
from examples.prepare_data.pipeline import Settings, refine, report_json, report_rows
from examples.prepare_data.problems import COLUMNS, read_held_out, read_problems, write_prompts

_PROGRAM = "python -m examples.prepare_data"


class _UsageError(Exception):
    """Invalid arguments; the message says what to change."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prepare a prompt file; returns 1 if nothing remains, or the model cannot take what does, and 2 for bad input."""
    args = _parser().parse_args(argv)
    try:
        return _run(args)
    except (_UsageError, DataError, TokenizerError, OSError) as error:
        say(f"{_PROGRAM}: {error}", error=True)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=_PROGRAM)
    parser.description = "Map columns; drop unverifiable answers, repeats, copies of evaluation files, long prompts."
    parser.add_argument("files", nargs="+", metavar="FILE", help="parquet, JSON lines, folders of datasets, patterns")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="prompt file to write (parquet)")
    parser.add_argument(
        "--map",
        nargs="+",
        default=[],
        metavar="NAME=COLUMN",
        help="problem, answer, id, data_source, ability; or a YAML file of them",
    )
    parser.add_argument("--source", default="", metavar="NAME", help="data_source of all rows; default: the file")
    parser.add_argument("--answer-after", metavar="TEXT", help="the answer is what follows this (GSM8K: '####')")
    parser.add_argument("--against", nargs="+", default=[], metavar="FILE", help="evaluation files to keep out")
    parser.add_argument("--ngram", type=int, default=13, metavar="N", help="words of a copy (%(default)s)")
    parser.add_argument(
        "--common", type=int, default=10, metavar="N", help="words that more problems share are no copy (%(default)s)"
    )
    parser.add_argument("--near", type=float, default=0.8, metavar="X", help="overlap of near duplicates (%(default)s)")
    parser.add_argument("--model", type=Path, metavar="DIR", help="whose tokenizer and chat template count tokens")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest rendered prompt; needs --model")
    parser.add_argument("--report", type=Path, metavar="FILE", help="default: OUTPUT with .report.json")
    parser.add_argument("--overwrite", action="store_true", help="replace OUTPUT")
    return parser


def _run(args: argparse.Namespace) -> int:
    if args.output.exists() and not args.overwrite:
        raise _UsageError(f"{args.output} exists; add --overwrite, or name another file")
    if args.output.suffix != ".parquet":
        raise _UsageError(f"--output {args.output}: the name must end with .parquet")
    if (args.max_tokens is None) != (args.model is None):
        raise _UsageError("--max-tokens and --model belong together: give both or none")
    if not args.near > 0:  # also NaN
        raise _UsageError(f"--near {args.near:g}: give a share above 0; above 1 there are no near duplicates")
    for name in ("ngram", "common", "max_tokens"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise _UsageError(f"--{name.replace('_', '-')} {value}: give at least 1")
    report = args.report or args.output.with_suffix(".report.json")
    _make_folder(args.output, "--output")
    _make_folder(report, "--report")
    columns = _columns(args.map)
    doubts: list[str] = []
    problems, unreadable = read_problems(args.files, columns, args.source, args.answer_after, doubts)
    settings = Settings(args.near, args.ngram, args.common, args.max_tokens)
    refined = refine(
        problems,
        settings,
        held_out=read_held_out(args.against),
        unverifiable=lambda answers: unverifiable(_with_answers(answers), RewardConfig()),
        tokens=_token_counter(args.model) if args.model else None,
    )
    dropped = [*unreadable, *refined.dropped]
    read = Counter([*(each.file for each in problems), *(each.file for each in unreadable)])
    stated = {**asdict(settings), "columns": columns, "against": args.against, "output": str(args.output)}
    content = report_json(stated, read, len(refined.kept), dropped, refined.common_phrases)
    report.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    _print_table(report_rows(read.total(), len(refined.kept), dropped))
    words = in_words(_with_answers([problem.answer for problem in refined.kept]), RewardConfig())
    if words:
        say(f"\nanswers that are words: {shown_words(words)}; does each of them say an answer?")
    for line in doubts:
        say(f"warning: {line}", error=True)
    if not refined.kept:
        say(f"\nnothing remains; all reasons: {report}")
        return 1
    write_prompts(refined.kept, args.output)
    say(f"\nwrote {args.output}; every dropped row, with its reason: {report}")
    wrong = check_prompt_file(args.output, args.model, args.max_tokens) if args.model else []
    for problem in wrong:
        say(f"{'error' if problem.failed else 'warning'}: {problem}", error=True)
    return 1 if failed(wrong) else 0


def _print_table(rows: Sequence[tuple[str, str, str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    say("\nProblems")
    for first, second, third in rows:
        say(f"  {first:<{widths[0]}}  {second:>{widths[1]}}  {third}".rstrip())


def _make_folder(file: Path, option: str) -> None:
    """Create the folder of an output file before any long work. Raises _UsageError."""
    if file.is_dir():
        raise _UsageError(f"{option} {file}: is a folder; name a file")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _UsageError(f"{option} {file}: {error.strerror}: {error.filename}; name another file") from error


def _columns(pairs: Sequence[str]) -> dict[str, str]:
    """Return the columns of a collection, from NAME=COLUMN or YAML files. Raises _UsageError."""
    given: dict[str, str] = {}
    for pair in pairs:
        name, separator, column = pair.partition("=")
        if separator:
            given[name] = column
            continue
        try:
            content = yaml.safe_load(Path(pair).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:  # ValueError: not UTF-8
            message = f"--map {pair}: neither NAME=COLUMN nor a YAML file that can be read ({error})"
            raise _UsageError(message) from error
        if not isinstance(content, dict):
            raise _UsageError(f"--map {pair}: the file must hold lines NAME: COLUMN")
        given |= {str(key): str(value) for key, value in content.items()}
    if unknown := sorted(given.keys() - COLUMNS.keys()):
        raise _UsageError(f"--map: unknown {', '.join(unknown)}; known are {', '.join(COLUMNS)}")
    return {**COLUMNS, **given}


def _with_answers(answers: Sequence[str]) -> list[Prompt]:
    return [Prompt("", "", (), answer, ()) for answer in answers]


def _token_counter(model: Path) -> Callable[[Sequence[str]], list[int]]:
    """Tokens of a problem as the only message of a prompt, without a system prompt and tools. Raises _UsageError."""
    tokenizer = read_tokenizer(model)
    if problem := template_problem(tokenizer):
        raise _UsageError(f"{model}: {problem}")

    def count(texts: Sequence[str]) -> list[int]:
        talks = [marked_messages(tokenizer, [{"role": "user", "content": text}]) for text in texts]
        rendered = tokenizer.apply_chat_template(talks, tokenize=False, add_generation_prompt=True)
        return [*map(len, token_ids(tokenizer, rendered))] if texts else []

    return count


if __name__ == "__main__":
    sys.exit(main())
