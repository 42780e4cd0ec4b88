"""Reads prompt files into `Prompt` records and hands them out in a reproducible, resumable order."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from ctpo_megatron.config import SystemPrompt
from ctpo_megatron.data.records import Prompt
from ctpo_megatron.data.tables import DataError, Problems, check_messages, find_files, plain_messages, read_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_REQUIRED = ("data_source", "prompt", "reward_model")
_OPTIONAL = ("id", "ability", "extra_info")


def load_prompts(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int,
    tool_schemas: Sequence[Mapping[str, Any]] = (),
    chat_template_kwargs: Mapping[str, Any] | None = None,
    system_prompt: SystemPrompt = SystemPrompt(),  # noqa: B008 - it is immutable
) -> list[Prompt]:
    """Read parquet files (paths or glob patterns) and render every prompt up to where the model speaks.

    `tool_schemas` are the tools that the chat template is offered; without any the prompt is rendered alone.
    `system_prompt` joins every prompt, and is then part of its messages.
    Raises DataError listing all bad rows at once: file, row, column, value and reason.
    """
    problems = Problems()
    places: list[tuple[Path, int]] = []
    prompts: list[Prompt] = []
    seen: dict[str, tuple[Path, int]] = {}
    for file in find_files(files, problems):
        for row, cells in read_rows(file, _REQUIRED, _OPTIONAL, problems):
            prompt = _parse(file, row, cells, system_prompt, problems)
            if prompt is None:
                continue
            if prompt.id in seen:
                first_file, first_row = seen[prompt.id]
                problems.row(file, row, "id", prompt.id, f"already used by {first_file} row {first_row}")
                continue
            seen[prompt.id] = (file, row)
            places.append((file, row))
            prompts.append(prompt)
    token_ids = _tokenize(prompts, places, tokenizer, tool_schemas, chat_template_kwargs, problems)
    for (file, row), prompt, ids in zip(places, prompts, token_ids, strict=True):
        if len(ids) > max_prompt_tokens:
            reason = (
                f"{len(ids)} tokens, limit {max_prompt_tokens}: raise data.max_prompt_tokens, and "
                "rollout.engine.max_model_len if it cannot hold prompt and response"
            )
            problems.row(file, row, "prompt", prompt.messages[-1]["content"], reason)
    problems.raise_if_any()
    if not prompts:
        raise DataError(f"no prompts in {', '.join(files)}")
    return [replace(prompt, token_ids=tuple(ids)) for prompt, ids in zip(prompts, token_ids, strict=True)]


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
    messages: tuple[dict[str, str], ...] = ()
    if reason is None:
        try:
            messages = system_prompt.before(plain_messages(cells["prompt"]))
        except ValueError as error:
            reason = str(error)
    if reason:
        bad.append(("prompt", cells["prompt"], reason))
    answer, reason = _answer(cells["reward_model"])
    if reason:
        bad.append(("reward_model", cells["reward_model"], reason))
    identity = cells.get("id")
    if not (identity is None or (isinstance(identity, int | str) and str(identity).strip())):
        bad.append(("id", identity, "expected a text or an integer"))
    extra = cells.get("extra_info")
    if not (extra is None or isinstance(extra, dict)):
        bad.append(("extra_info", extra, "expected a record"))
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
    if isinstance(truth, bool) or not isinstance(truth, int | float | str):
        return "", f"'ground_truth' must be a text or a number, not {type(truth).__name__}"
    text = str(truth).strip()
    return text, None if text else "the answer in 'ground_truth' is empty"


def _tokenize(
    prompts: Sequence[Prompt],
    places: Sequence[tuple[Path, int]],
    tokenizer: PreTrainedTokenizerBase,
    tool_schemas: Sequence[Mapping[str, Any]],
    chat_template_kwargs: Mapping[str, Any] | None,
    problems: Problems,
) -> list[list[int]]:
    """Token ids of every prompt, rendered with a generation prompt; a template's refusal is a problem of its row."""
    import jinja2

    tools = [dict(schema) for schema in tool_schemas] or None
    texts: list[str] = []
    for (file, row), prompt in zip(places, prompts, strict=True):
        try:
            text = tokenizer.apply_chat_template(
                list(prompt.messages),
                tools=tools,
                tokenize=False,
                add_generation_prompt=True,
                **(chat_template_kwargs or {}),
            )
        except jinja2.TemplateError as error:
            problems.row(file, row, "prompt", prompt.messages, f"the chat template refuses it: {error}")
            text = ""
        texts.append(text)
    return tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []


def _digest(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for prompt in prompts:
        digest.update(json.dumps([prompt.id, prompt.token_ids, prompt.answer]).encode())
    return digest.hexdigest()


class PromptSampler:
    """Endless stream over `prompts`: every epoch visits each once, in an order that depends on seed and epoch only."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool = True) -> None:
        """Raises ValueError when there is nothing to sample from."""
        if not prompts:
            raise ValueError("a prompt sampler needs at least one prompt")
        self._prompts = prompts
        self._shuffle = shuffle
        self._seed = seed
        self._digest = _digest(prompts)
        self._start(epoch=0, cursor=0)

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts; a batch that crosses the end of an epoch goes on with the next one."""
        taken: list[Prompt] = []
        while len(taken) < count:
            if self._cursor == len(self._order):
                self._start(self._epoch + 1, cursor=0)
            indices = self._order[self._cursor : self._cursor + count - len(taken)]
            taken += [self._prompts[index] for index in indices]
            self._cursor += len(indices)
        return taken

    def state_dict(self) -> dict[str, Any]:
        """Position in the stream: {epoch, cursor, seed}, and what it is a position in.

        consumed: the ids taken from this epoch, in order. digest: blake2b-128, in hexadecimal, of all prompts.
        """
        consumed = [self._prompts[index].id for index in self._order[: self._cursor]]
        position = {"epoch": self._epoch, "cursor": self._cursor, "seed": self._seed}
        return position | {"consumed": consumed, "digest": self._digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken, so that every prompt of the epoch is taken exactly once.

        Raises ValueError when this stream would not have given the prompts that `state` says were taken, or has other
        prompts, tokens or answers under their ids; any will do if none was taken yet.
        """
        if state["seed"] != self._seed:
            raise ValueError(f"the saved prompt order used seed {state['seed']}, this run uses seed {self._seed}")
        if not 0 <= state["cursor"] <= len(self._prompts):
            raise ValueError(
                f"the saved position is {state['cursor']}, but there are {len(self._prompts)} prompts: other data?"
            )
        self._start(state["epoch"], state["cursor"])
        for place, (ours, saved) in enumerate(zip(self.state_dict()["consumed"], state["consumed"], strict=True)):
            if ours != saved:
                raise ValueError(
                    f"prompt {place + 1} of epoch {state['epoch']} was {saved!r}, these data give {ours!r}: "
                    "give the run the data.train and data.shuffle that it was begun with"
                )
        if "digest" not in state:
            log.warning("the checkpoint is of an earlier version: whether data.train has changed cannot be told")
        elif state["digest"] != self._digest and (state["epoch"], state["cursor"]) != (0, 0):
            raise ValueError(
                "prompts have other tokens or answers under the same ids, or there are others: give the run the "
                "data.train, data.system_prompt, data.tool_in_prompt, tokenizer and chat template that it was begun "
                "with"
            )

    def _start(self, epoch: int, cursor: int) -> None:
        self._epoch, self._cursor = epoch, cursor
        self._order = list(range(len(self._prompts)))
        if self._shuffle:
            Random(f"{self._seed}/{epoch}").shuffle(self._order)
