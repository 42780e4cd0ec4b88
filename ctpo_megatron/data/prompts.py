"""Reads prompt files into `Prompt` records, rendered and checked; what is wrong is collected, row by row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctpo_megatron.base.text import printable
from ctpo_megatron.data.data_files import data_stem, find_files
from ctpo_megatron.data.marks import Offered, calls_problem, encode, render, unmarked
from ctpo_megatron.data.messages import ChatMessage, check_messages, check_tools
from ctpo_megatron.data.numbers import FloatType, number_text, number_warning
from ctpo_megatron.data.problems import Problems
from ctpo_megatron.data.records import Prompt
from ctpo_megatron.data.rows import (
    Cell,
    Location,
    RowRules,
    RowSet,
    Rule,
)
from ctpo_megatron.data.tables import Table


@dataclass(frozen=True)
class PromptRules(RowRules):
    """How prompt files become prompts.

    max_prompt_tokens: of a rendered prompt; overlong: whether longer ones are errors or left out.
    held_out: an id must be unique within its file only (if files share ids, every id is prefixed by the file's name),
    and no rows are left out.
    """

    max_prompt_tokens: int
    overlong: Rule = "refuse"
    held_out: bool = False


@dataclass
class PromptSet(RowSet):
    """The prompts of some files. precision: of the numbers among the ground truths of each file."""

    called = "prompts"

    prompts: list[Prompt] = field(default_factory=list)
    precision: dict[Path, FloatType] = field(default_factory=dict)

    def name(self, index: int) -> str:
        """Return the prompt's id."""
        return self.prompts[index].id

    def tokens(self, index: int) -> Sequence[int]:
        """Return the token ids of a prompt."""
        return self.prompts[index].token_ids

    def mix(self, entries: Sequence[str]) -> list[list[Prompt]]:
        """Return the prompts of each entry, which is a path, a folder, a pattern or a name that these were read
        from.
        """
        files = [set(find_files([entry], Problems(), self.hub)) for entry in entries]
        placed = list(zip(self.prompts, self.places, strict=True))
        return [[prompt for prompt, (file, _) in placed if file in each] for each in files]

    def _see(self, file: Path, table: Table) -> None:
        super()._see(file, table)
        self.precision[file] = table.precision(_TRUTH, "ground_truth")

    def keep(self, indices: Sequence[int]) -> None:
        super().keep(indices)
        self.prompts = [self.prompts[index] for index in indices]


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REQUIRED = ("data_source", "prompt", "reward_model")
_OPTIONAL = ("id", "ability", "extra_info", "tools")
_TRUTH = "reward_model"


def read_prompts(files: Sequence[str], tokenizer: PreTrainedTokenizerBase, rules: PromptRules) -> PromptSet:
    """Read prompt files and render every prompt up to where the model speaks.

    files: paths, folders or glob patterns (docs/data.md). What is wrong, and what was left out, is in the result:
    `problems.raise_if_any` raises DataError that lists all bad rows.
    """
    found, tools, inexact = PromptSet(), list[Offered](), dict[int, Cell]()
    for place, cells in found.read(files, _REQUIRED, _OPTIONAL, rules):
        stored = found.precision[place[0]]
        prompt = _parse(place, cells, rules, stored, found.problems)
        if prompt is not None:
            truth = cells[_TRUTH]["ground_truth"]
            if reason := number_warning(truth, stored):
                inexact[len(found.places)] = (_TRUTH, truth, reason)
            found.add(place, cells, prompt.messages)
            found.prompts.append(prompt)
            tools.append(rules.tools_of(cells))
    found.warn(inexact)
    if rules.held_out:
        _name_by_file(found)
    _refuse_duplicates(found)
    _render(found, tools, tokenizer, rules)
    return found


def _parse(
    place: Location, cells: dict[str, Any], rules: PromptRules, stored: FloatType, problems: Problems
) -> Prompt | None:
    """The row's prompt without token ids, or None after reporting every bad cell."""
    bad: list[tuple[str, object, str]] = []
    source = cells["data_source"]
    if not isinstance(source, str) or not source.strip():
        bad.append(("data_source", source, "expected a non-empty text"))
    reason = check_messages(cells["prompt"])
    if reason is None and cells["prompt"][-1]["role"] == "assistant":
        reason = "ends with an assistant message, so there is nothing left to answer"
    if reason is None and not any((message.get("content") or "").strip() for message in cells["prompt"]):
        reason = "has only empty messages"
    messages: tuple[ChatMessage, ...] = ()
    if reason is None:
        messages, reason = rules.messages_of(cells["prompt"])
    if reason:
        bad.append(("prompt", cells["prompt"], reason))
    answer, reason = _answer(cells[_TRUTH], stored)
    if reason:
        bad.append((_TRUTH, cells[_TRUTH], reason))
    identity = cells.get("id")
    if isinstance(identity, bool) or not (
        identity is None or (isinstance(identity, int | str) and str(identity).strip())
    ):
        bad.append(("id", identity, "expected a text or an integer"))
    extra = cells.get("extra_info")
    if not (extra is None or isinstance(extra, dict)):
        bad.append(("extra_info", extra, "expected a record"))
    if cells.get("tools") and (reason := check_tools(cells["tools"])):
        bad.append(("tools", cells["tools"], reason))
    for column, value, why in bad:
        problems.row(*place, column, value, why)
    if bad:
        return None
    extra = {"ability": cells.get("ability"), **(extra or {})}
    return Prompt(
        id=printable(f"{data_stem(place[0])}/{place[1]}" if identity is None else str(identity)),
        data_source=printable(source),
        messages=messages,
        answer=answer,
        token_ids=(),
        extra={key: value for key, value in extra.items() if value is not None},
    )


def _answer(value: object, stored: FloatType) -> tuple[str, str | None]:
    """The ground truth as text, and the reason why there is none."""
    if not isinstance(value, dict) or "ground_truth" not in value:
        return "", "expected a record with the field 'ground_truth'"
    truth = value["ground_truth"]
    if isinstance(truth, bool) or not isinstance(truth, int | float | Decimal | str):
        return "", f"'ground_truth' must be a text or a number, not {type(truth).__name__}"
    try:
        text = truth.strip() if isinstance(truth, str) else number_text(truth, stored)
    except ValueError as error:
        return "", f"'ground_truth' {error}"
    return text, None if text else "the answer in 'ground_truth' is empty"


def _name_by_file(found: PromptSet) -> None:
    """Where files share an id, put the name of its file, as short as tells them apart, before every id."""
    of_files: dict[str, set[Path]] = {}
    for prompt, (file, _) in zip(found.prompts, found.places, strict=True):
        of_files.setdefault(prompt.id, set()).add(file)
    if all(len(files) == 1 for files in of_files.values()):
        return
    files = list(found.rows)
    names = {file: data_stem(file) for file in files}
    for parts in range(1, max(len(file.parts) for file in files) + 1):
        shared = Counter(names.values())
        if max(shared.values()) == 1:
            break
        names = {file: str(Path(*file.parts[-parts:]).with_name(data_stem(file))) for file in files}
    found.prompts = [
        replace(prompt, id=printable(f"{names[file]}/{prompt.id}"))
        for prompt, (file, _) in zip(found.prompts, found.places, strict=True)
    ]


def _refuse_duplicates(found: PromptSet) -> None:
    first: dict[str, Location] = {}
    for prompt, place in zip(found.prompts, found.places, strict=True):
        file, row = first.setdefault(prompt.id, place)
        if (file, row) != place:
            found.problems.row(*place, "id", prompt.id, f"already used by {file} row {row}")


def _render(found: PromptSet, tools: Sequence[Offered], tokenizer: PreTrainedTokenizerBase, rules: PromptRules) -> None:
    """Text and token ids of every prompt; a template's refusal is a problem of its row."""
    options = {"add_generation_prompt": True, **rules.template_options}
    texts, reasons = render(found.messages, tools, tokenizer, options)
    found.texts = [*map(unmarked, texts)]
    refused: dict[int, Cell] = {}
    for index, (said, text) in enumerate(zip(found.messages, texts, strict=True)):
        if reason := reasons.get(index) or calls_problem(said, text):
            refused[index] = ("prompt", list(said), reason)
    found.exclude(refused)
    ids = encode(texts, tokenizer)
    found.prompts = [replace(prompt, token_ids=tuple(row)) for prompt, row in zip(found.prompts, ids, strict=True)]
    overlong = dict(_overlong(found.prompts, rules.max_prompt_tokens))
    found.exclude(overlong, "" if rules.held_out else "data.overlong", rules.overlong)


def _overlong(prompts: Sequence[Prompt], limit: int) -> list[tuple[int, Cell]]:
    fix = "raise data.max_prompt_tokens, and rollout.engine.max_model_len if it cannot hold prompt and response"
    return [
        (index, ("prompt", prompt.messages[-1]["content"], f"{len(prompt.token_ids)} tokens, limit {limit}: {fix}"))
        for index, prompt in enumerate(prompts)
        if len(prompt.token_ids) > limit
    ]
