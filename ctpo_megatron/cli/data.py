"""`ctpo data prepare`: turns a collection of problems with answers into a prompt file, and reports dropped problems."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ctpo_megatron.base.chat_template import apply_chat_template, marked_messages, token_ids
from ctpo_megatron.base.printable import say
from ctpo_megatron.cli.console import print_table
from ctpo_megatron.cli.errors import UsageError, make_folder
from ctpo_megatron.preflight import check_prompt_file, failed

if TYPE_CHECKING:
    from ctpo_megatron.data import Prompt


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Make prompt files."
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    prepare = actions.add_parser("prepare", help="from a collection of problems with final answers")
    prepare.description = "Map columns; drop unverifiable answers, repeats, copies of evaluation files, long prompts."
    prepare.add_argument("files", nargs="+", metavar="FILE", help="parquet, JSON lines, folders of datasets, patterns")
    prepare.add_argument("--output", type=Path, required=True, metavar="FILE", help="prompt file to write (parquet)")
    prepare.add_argument(
        "--map",
        nargs="+",
        default=[],
        metavar="NAME=COLUMN",
        help="problem, answer, id, data_source, ability; or a YAML file of them",
    )
    prepare.add_argument("--source", default="", metavar="NAME", help="data_source of all rows; default: the file")
    prepare.add_argument("--answer-after", metavar="TEXT", help="the answer is what follows this (GSM8K: '####')")
    prepare.add_argument("--against", nargs="+", default=[], metavar="FILE", help="evaluation files to keep out")
    prepare.add_argument("--ngram", type=int, default=13, metavar="N", help="words of a copy (%(default)s)")
    prepare.add_argument(
        "--common", type=int, default=10, metavar="N", help="words that more problems share are no copy (%(default)s)"
    )
    prepare.add_argument(
        "--near", type=float, default=0.8, metavar="X", help="overlap of near duplicates (%(default)s)"
    )
    prepare.add_argument("--model", type=Path, metavar="DIR", help="whose tokenizer and chat template count tokens")
    prepare.add_argument("--max-tokens", type=int, metavar="N", help="longest rendered prompt; needs --model")
    prepare.add_argument("--report", type=Path, metavar="FILE", help="default: OUTPUT with .report.json")
    prepare.add_argument("--overwrite", action="store_true", help="replace OUTPUT")


def run(args: argparse.Namespace) -> int:
    """Prepare a prompt file; returns 1 if nothing remains, or the model cannot take what does."""
    from ctpo_megatron.data import refine as steps

    if args.output.exists() and not args.overwrite:
        raise UsageError(f"{args.output} exists; add --overwrite, or name another file")
    if args.output.suffix != ".parquet":
        raise UsageError(f"--output {args.output}: the name must end with .parquet")
    if (args.max_tokens is None) != (args.model is None):
        raise UsageError("--max-tokens and --model belong together: give both or none")
    if not args.near > 0:  # also NaN
        raise UsageError(f"--near {args.near:g}: give a share above 0; above 1 there are no near duplicates")
    for name in ("ngram", "common", "max_tokens"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value}: give at least 1")
    report = args.report or args.output.with_suffix(".report.json")
    _make_place(args.output, "--output")
    _make_place(report, "--report")
    columns = _columns(args.map, steps.COLUMNS)
    doubts: list[str] = []
    problems, unreadable = steps.read_problems(args.files, columns, args.source, args.answer_after, doubts)
    settings = steps.Settings(args.near, args.ngram, args.common, args.max_tokens)
    refined = steps.refine(
        problems,
        settings,
        held_out=steps.read_held_out(args.against),
        unverifiable=_unverifiable,
        tokens=_token_counter(args.model) if args.model else None,
    )
    dropped = [*unreadable, *refined.dropped]
    read = Counter([*(each.file for each in problems), *(each.file for each in unreadable)])
    said = {**asdict(settings), "columns": columns, "against": args.against, "output": str(args.output)}
    content = steps.report_json(said, read, len(refined.kept), dropped, refined.common_phrases)
    report.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    rows = steps.report_rows(read.total(), len(refined.kept), dropped)
    print_table("Problems", ("what", "rows", "which"), rows)
    if words := _in_words([problem.answer for problem in refined.kept]):
        say(f"\nanswers that are words: {words}; does each of them say an answer?")
    for line in doubts:
        say(f"warning: {line}", error=True)
    if not refined.kept:
        print(f"\nnothing remains; all reasons: {report}")
        return 1
    steps.write_prompts(refined.kept, args.output)
    print(f"\nwrote {args.output}; every dropped row, with its reason: {report}", flush=True)
    found = check_prompt_file(args.output, args.model, args.max_tokens) if args.model else []
    for problem in found:
        say(f"{'error' if problem.failed else 'warning'}: {problem}", error=True)
    return 1 if failed(found) else 0


def _make_place(file: Path, flag: str) -> None:
    """Create the folder of an output file before any long work. Raises UsageError."""
    if file.is_dir():
        raise UsageError(f"{flag} {file}: is a folder; name a file")
    make_folder(file.parent, f"{flag} {file}", "file")


def _columns(pairs: Sequence[str], default: dict[str, str]) -> dict[str, str]:
    """The columns of a collection, from NAME=COLUMN or YAML files. Raises UsageError."""
    given: dict[str, str] = {}
    for pair in pairs:
        name, separator, column = pair.partition("=")
        if separator:
            given[name] = column
            continue
        import yaml

        try:
            content = yaml.safe_load(Path(pair).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:  # ValueError: not UTF-8
            raise UsageError(f"--map {pair}: neither NAME=COLUMN nor a YAML file that can be read ({error})") from error
        if not isinstance(content, dict):
            raise UsageError(f"--map {pair}: the file must hold lines NAME: COLUMN")
        given |= {str(key): str(value) for key, value in content.items()}
    if unknown := sorted(given.keys() - default.keys()):
        raise UsageError(f"--map: unknown {', '.join(unknown)}; known are {', '.join(default)}")
    return {**default, **given}


def _unverifiable(answers: Sequence[str]) -> dict[int, str]:
    from ctpo_megatron.config import RewardConfig
    from ctpo_megatron.rewards import unverifiable

    return unverifiable(_with_answers(answers), RewardConfig())


def _in_words(answers: Sequence[str]) -> str:
    """The most frequent answers that are words; "" without any."""
    from ctpo_megatron.config import RewardConfig
    from ctpo_megatron.rewards import in_words, shown_words

    return shown_words(in_words(_with_answers(answers), RewardConfig()))


def _with_answers(answers: Sequence[str]) -> list[Prompt]:
    from ctpo_megatron.data import Prompt

    return [Prompt("", "", (), answer, ()) for answer in answers]


def _token_counter(model: Path) -> Callable[[Sequence[str]], list[int]]:
    """Tokens of a problem as the only message of a prompt, without a system prompt and tools. Raises UsageError."""
    from ctpo_megatron.environments.tokenizer import TokenizerError, read_tokenizer, template_problem

    try:
        tokenizer = read_tokenizer(model)
    except TokenizerError as error:
        raise UsageError(str(error)) from error
    if problem := template_problem(tokenizer):
        raise UsageError(f"{model}: {problem}")

    def count(texts: Sequence[str]) -> list[int]:
        talks = [marked_messages(tokenizer, [{"role": "user", "content": text}]) for text in texts]
        rendered = apply_chat_template(tokenizer, talks, add_generation_prompt=True)
        return [*map(len, token_ids(tokenizer, rendered))] if texts else []

    return count
