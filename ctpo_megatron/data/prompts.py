"""Reads prompt files into `Prompt` records, rendered and checked; what is wrong is collected, row by row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ctpo_megatron.config import SystemPrompt
from ctpo_megatron.data.messages import (
    ChatMessage,
    check_messages,
    check_tools,
    dropped_calls,
    plain_messages,
    plain_tools,
)
from ctpo_megatron.data.numbers import number_text
from ctpo_megatron.data.problems import Problems
from ctpo_megatron.data.prompt import Prompt
from ctpo_megatron.data.tables import count_rows, find_files, read_rows

_EXAMPLES = 5

Rule = Literal["refuse", "drop"]
Location = tuple[Path, int]
"""File, and row in it."""
Cell = tuple[str, object, str]
"""Column, value, and the problem."""


@dataclass(frozen=True)
class PromptRules:
    """How prompt files become prompts.

    max_prompt_tokens: of a rendered prompt; overlong: whether longer ones are errors or left out.
    tool_schemas: passed to the chat template for rows without their own `tools`.
    held_out: an id must be unique within its file only (if files share ids, every id is prefixed by the file's name),
    and no rows are left out. limit: rows to read from each file. system_prompt: becomes part of the messages of every
    prompt.
    """

    max_prompt_tokens: int
    overlong: Rule = "refuse"
    tool_schemas: Sequence[Mapping[str, Any]] = ()
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    held_out: bool = False
    limit: int | None = None
    system_prompt: SystemPrompt = SystemPrompt()  # noqa: RUF009 - it is immutable


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A row that was left out, the configuration key responsible, and the reason."""

    file: Path
    row: int
    id: str
    rule: str
    reason: str


@dataclass
class PromptSet:
    """The prompts of some files with their locations, problems, and rows that were left out.

    rows: number of rows of each file, read or not. texts: the rendered prompts.
    """

    prompts: list[Prompt] = field(default_factory=list)
    places: list[Location] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    rows: dict[Path, int] = field(default_factory=dict)
    problems: Problems = field(default_factory=Problems)
    left_out: list[LeftOut] = field(default_factory=list)

    def exclude(self, cells: Mapping[int, Cell], key: str = "", rule: Rule = "refuse") -> None:
        """Report prompts by their index, for a cell of each, as errors; or leave them out, as the key says.

        key: of the configuration, if leaving them out is offered.
        """
        fix = f"; or set {key}: drop" if key else ""
        for count, (index, (column, value, reason)) in enumerate(cells.items()):
            file, row = self.places[index]
            if rule == "drop":
                self.left_out.append(LeftOut(file, row, self.prompts[index].id, key, reason))
            elif count < _EXAMPLES:
                self.problems.row(file, row, column, value, reason + fix)
        if rule == "refuse" and len(cells) > _EXAMPLES:
            self.problems.general(f"{len(cells) - _EXAMPLES} more rows with such a {column!r}, {len(cells)} in all")
        if rule == "refuse":
            return
        kept = [index for index in range(len(self.prompts)) if index not in cells]
        self.prompts = [self.prompts[index] for index in kept]
        self.places = [self.places[index] for index in kept]
        self.texts = [self.texts[index] for index in kept]


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
    found, tools = PromptSet(), []
    for file in find_files(files, found.problems):
        found.rows[file] = count_rows(file)
        for row, cells in read_rows(file, _REQUIRED, _OPTIONAL, found.problems, rules.limit):
            prompt = _parse(file, row, cells, rules.system_prompt, found.problems)
            if prompt is not None:
                found.prompts.append(prompt)
                found.places.append((file, row))
                tools.append(plain_tools(cells["tools"]) if cells.get("tools") else None)
    if not found.prompts and not found.problems.lines:
        found.problems.general(f"no prompts in {', '.join(files)}")
    if rules.held_out:
        _name_by_file(found)
    _refuse_twins(found)
    _render(found, tools, tokenizer, rules)
    return found


def _parse(
    file: Path, row: int, cells: dict[str, Any], system_prompt: SystemPrompt, problems: Problems
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
        try:
            messages = system_prompt.before(plain_messages(cells["prompt"]))
        except ValueError as error:
            reason = str(error)
    if reason:
        bad.append(("prompt", cells["prompt"], reason))
    answer, reason = _answer(cells[_TRUTH])
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
        problems.row(file, row, column, value, why)
    if bad:
        return None
    extra = {"ability": cells.get("ability"), **(extra or {})}
    return Prompt(
        id=f"{file.stem}/{row}" if identity is None else str(identity),
        data_source=source,
        messages=messages,
        answer=answer,
        token_ids=(),
        extra={key: value for key, value in extra.items() if value is not None},
    )


def _answer(value: object) -> tuple[str, str | None]:
    """The ground truth as text, and the reason why there is none."""
    if not isinstance(value, dict) or "ground_truth" not in value:
        return "", "expected a record with the field 'ground_truth'"
    truth = value["ground_truth"]
    if isinstance(truth, bool) or not isinstance(truth, int | float | Decimal | str):
        return "", f"'ground_truth' must be a text or a number, not {type(truth).__name__}"
    try:
        text = truth.strip() if isinstance(truth, str) else number_text(truth)
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
    names = {file: file.stem for file in files}
    for parts in range(1, max(len(file.parts) for file in files) + 1):
        shared = Counter(names.values())
        if max(shared.values()) == 1:
            break
        names = {file: str(Path(*file.parts[-parts:]).with_suffix("")) for file in files}
    found.prompts = [
        replace(prompt, id=f"{names[file]}/{prompt.id}")
        for prompt, (file, _) in zip(found.prompts, found.places, strict=True)
    ]


def _refuse_twins(found: PromptSet) -> None:
    first: dict[str, Location] = {}
    for prompt, place in zip(found.prompts, found.places, strict=True):
        file, row = first.setdefault(prompt.id, place)
        if (file, row) != place:
            found.problems.row(*place, "id", prompt.id, f"already used by {file} row {row}")


def _render(
    found: PromptSet,
    tools: Sequence[list[dict[str, Any]] | None],
    tokenizer: PreTrainedTokenizerBase,
    rules: PromptRules,
) -> None:
    """Text and token ids of every prompt; a template's refusal is a problem of its row."""
    import jinja2

    offered = [dict(schema) for schema in rules.tool_schemas] or None
    refused: dict[int, Cell] = {}
    for index, (prompt, own) in enumerate(zip(found.prompts, tools, strict=True)):
        messages, text = list(prompt.messages), ""
        try:
            text = tokenizer.apply_chat_template(
                messages, tools=own or offered, tokenize=False, add_generation_prompt=True, **rules.chat_template_kwargs
            )
        except (jinja2.TemplateError, TypeError) as error:
            refused[index] = ("prompt", messages, f"the chat template refuses it: {error}")
        found.texts.append(text)
        if index not in refused and (names := dropped_calls(messages, text)):
            reason = f"the chat template does not show the calls in `tool_calls`: {', '.join(names)}"
            refused[index] = ("prompt", messages, reason)
    found.exclude(refused)
    ids = tokenizer(found.texts, add_special_tokens=False)["input_ids"] if found.texts else []
    found.prompts = [replace(prompt, token_ids=tuple(i)) for prompt, i in zip(found.prompts, ids, strict=True)]
    overlong = dict(_overlong(found.prompts, rules.max_prompt_tokens))
    found.exclude(overlong, "" if rules.held_out else "data.overlong", rules.overlong)


def _overlong(prompts: Sequence[Prompt], limit: int) -> list[tuple[int, Cell]]:
    fix = "raise data.max_prompt_tokens, and rollout.engine.max_model_len if it cannot hold prompt and response"
    return [
        (index, ("prompt", prompt.messages[-1]["content"], f"{len(prompt.token_ids)} tokens, limit {limit}: {fix}"))
        for index, prompt in enumerate(prompts)
        if len(prompt.token_ids) > limit
    ]
