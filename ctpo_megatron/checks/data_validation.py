"""Data validation: one pass over every row, shared by dry run, training and `ctpo eval`. No torch.

Rows are rendered, compared with what the run was begun with (`rendering`), and checked: ids, lengths, and whether the
text shows the model what it is judged by. Errors refuse, warnings do not.
"""

from __future__ import annotations

import gc
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctpo_megatron.checks.rendering import Kind, Rendering
from ctpo_megatron.config import (
    Config,
    ConfigError,
    HubName,
    Problem,
    RewardConfig,
    RolloutConfig,
    read_spec,
    sequence_multiple,
    spec_for,
)
from ctpo_megatron.data import special_tokens
from ctpo_megatron.environments import (
    MessageTemplate,
    ParseError,
    TokenizerError,
    end_tokens,
    example_call,
    make_parser,
    offered_schemas,
    read_tokenizer,
    stop_token_ids,
    system_prompt,
)
from ctpo_megatron.models import ModelSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ctpo_megatron.data import Cell, ChatMessage, ConversationSet, HubFiles, Prompt, PromptSet, RowSet

    WrongMessages = Iterator[tuple[ChatMessage, str]]
    """Messages of a row, and what is wrong with each."""

_KEYS: dict[Kind, str] = {"train": "data.train", "eval": "data.eval", "sft": "sft.data"}
_ASKED, _TAUGHT = ("system", "user", "tool"), ("system", "user", "tool", "assistant")
"""Roles whose messages the text of a prompt must show, and the text of a conversation."""
_BOX = re.compile(r"\\f?box|boxed", re.IGNORECASE)
_MEDIA = re.compile(r"<\|?(?:image|video|audio)(?:_pad|_1)?\|?>")
_BLIND = "images, videos and sounds are not read, and the model is trained without them; leave such rows out"


@dataclass(frozen=True)
class DataValidation:
    """Reads every row of a configuration, and says what is wrong with it.

    spec: of the model; None: ids and lengths are not compared with it. rendering: of the run. taught: SFT shows the
    model how to call tools and to answer, so that prompts need not. limit: rows to read from each file.
    """

    config: Config
    tokenizer: PreTrainedTokenizerBase
    spec: ModelSpec | None
    rendering: Rendering
    taught: bool
    limit: int | None = None

    @classmethod
    def of(
        cls, config: Config, directory: Path | None = None, *, taught: bool | None = None, limit: int | None = None
    ) -> DataValidation:
        """Of a run, or of `ctpo eval`, in `directory`; None: of a dry run, which writes nothing.

        A dry run of a run that would be resumed is compared with what that was begun with, and leaves `problem` to the
        caller. taught: None: if there is a supervised stage. Raises TokenizerError for a chat template or a tokenizer
        that cannot be used, DamagedFileError for `rendering.json`.
        """
        from ctpo_megatron.environments import chat_tokenizer  # it loads numpy, as all that reads rows

        planned = directory is None
        kept = config.run.directory if planned and config.run.resume else directory
        tokenizer = chat_tokenizer(config.model, offered_schemas(config.data, config.rollout))
        rendering = Rendering.of(config, tokenizer, kept, writes=not planned)
        teaches = config.sft is not None if taught is None else taught
        validation = cls(config, tokenizer, _spec(spec_for, config), rendering, teaches, limit)
        if not planned and (problem := validation.problem()):
            raise TokenizerError(problem)
        return validation

    def training(self) -> PromptSet:
        """Return the prompts of `data.train`."""
        from ctpo_megatron.environments import training_prompts

        return self._prompts("train", training_prompts, self.config.data.train_files)

    def held_out(self, training: PromptSet | None = None) -> PromptSet:
        """Return the prompts of `data.eval`. training: of `data.train`, to compare them with."""
        from ctpo_megatron.environments import held_out_prompts

        found = self._prompts("eval", held_out_prompts, self.config.data.eval)
        if training is not None:
            check_held_out(found, training)
        return found

    def conversations(self) -> ConversationSet:
        """Return the conversations of `sft.data`."""
        from ctpo_megatron.data import ConversationRules, read_conversations

        config, files = self.config, self.config.sft.data if self.config.sft else ()
        rules = ConversationRules(
            tool_schemas=offered_schemas(config.data, config.rollout),
            chat_template_kwargs=config.model.chat_template_kwargs,
            system_prompt=system_prompt(config.data, config.rollout),
            end_tokens=end_tokens(self.tokenizer, config.model.path),
            limit=self.limit,
            began=self.rendering.began,
            hub=self._hub("sft", files),
        )
        with _uncollected():
            found = read_conversations(files, self.tokenizer, rules)
        check_rows(found, "messages", _TAUGHT, self.tokenizer, self.spec)
        found.exclude(_first_wrong(found, "messages", _words_of_tools))
        check_lengths(found, config, self.spec)
        check_count(found, config)
        self.rendering.check("sft", found)
        return found

    def problem(self) -> str:
        """Return why no row could be used: end tokens or calls that would not be recognized; or ""."""
        model = self.config.model
        try:
            stops = sorted(stop_token_ids(self.tokenizer, model.path))
            MessageTemplate(self.tokenizer, model.chat_template_kwargs, stops).check_end()
        except TokenizerError as error:
            return str(error)
        return call_problem(self.tokenizer, self.config.rollout)

    def check_vocabulary(self) -> None:
        """Raises ConfigError for a tokenizer of more tokens than the model has."""
        if (found := len(self.tokenizer)) > (rows := spec_for(self.config).vocab_size):
            message = f"the tokenizer has {found} tokens, but the model's vocabulary {rows} (vocab_size in config.json)"
            fix = "resize the model's embeddings for the tokens that were added, or use the tokenizer it came with"
            raise ConfigError([Problem("model.path", message, fix, self.config.model.path)])

    def _prompts(self, kind: Kind, read: Callable[..., PromptSet], files: Sequence[str]) -> PromptSet:
        config = self.config
        reading = {"limit": self.limit, "began": self.rendering.began, "hub": self._hub(kind, files)}
        with _uncollected():
            found = read(config, self.tokenizer, **reading)
        check_rows(found, "prompt", _ASKED, self.tokenizer, self.spec)
        if not self.taught:
            check_answer_form(found, config.reward)
            check_call_form(found, config.rollout)
        self.rendering.check(kind, found)
        return found

    def _hub(self, kind: Kind, files: Sequence[str]) -> dict[str, HubFiles]:
        """Resolve names of the Hub: at the commits that the run was begun with, else as they are now."""
        from ctpo_megatron.data import HubError, HubFiles, hub_files
        from ctpo_sandbox.isolation.readable import readable_above

        found, key = dict[str, HubFiles](), _KEYS[kind]
        for text in files:
            if (name := HubName.of(text)) is None:
                continue
            try:
                found[text] = hub_files(name, self.rendering.former.get(kind, {}).get(text))
            except HubError as error:
                found[text] = HubFiles(problem=f"{key} {text}: {error}")
                continue
            above = next(filter(None, map(readable_above, found[text].files)), None)
            if above is not None and self.config.rollout.needs_sandbox:
                why = f"is kept below {above}, which programs in the sandbox may read: set HF_HOME to another folder"
                found[text] = HubFiles(problem=f"{key} {text}: {why}")
        return found


def check_prompt_file(file: Path, model: Path, max_tokens: int) -> list[Problem]:
    """Return the problems of a prompt file for a model, whose prompts may have `max_tokens`. Raises TokenizerError."""
    from ctpo_megatron.data import PromptRules, read_prompts

    tokenizer = read_tokenizer(model)
    with _uncollected():
        found = read_prompts([str(file)], tokenizer, PromptRules(max_tokens))
    check_rows(found, "prompt", _ASKED, tokenizer, _spec(read_spec, model))
    return [
        *(Problem("", line) for line in found.problems.shown()),
        *(Problem("", line, severity="warning") for line in found.warnings.lines),
    ]


def _spec(read: Callable[[Any], ModelSpec], source: Config | Path) -> ModelSpec | None:
    """The model's; None where it cannot be read, which other checks report, or is of a family that is not ours."""
    try:
        return read(source)
    except ConfigError:
        return None


@contextmanager
def _uncollected() -> Iterator[None]:
    """No collections of garbage: rows are many and stay, and to look at them again and again costs a third more."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def call_problem(tokenizer: PreTrainedTokenizerBase, rollout: RolloutConfig) -> str:
    """Return why the parser could not read its own example after the tokenizer, or ""."""
    if not rollout.tools:
        return ""
    parser = make_parser(rollout)
    said, call = example_call(parser)
    back = str(tokenizer.decode(tokenizer(said, add_special_tokens=False)["input_ids"]))
    if back == said or not hasattr(parser, "example"):
        return ""
    try:
        read, why = parser.parse(back), "other arguments"
    except ParseError as error:
        read, why = [], str(error)
    if [(each.name, each.arguments) for each in read] == [(call.name, call.arguments)]:
        return ""
    return (
        f"the tokenizer turns a tool call into {back!r}, which rollout.tool_parser: {rollout.tool_parser.name} does "
        f"not read ({why}); repair tokenizer.json, or take it from the model's publisher"
    )


def check_rows(
    found: RowSet, column: str, roles: Sequence[str], tokenizer: PreTrainedTokenizerBase, spec: ModelSpec | None
) -> None:
    """Check what prompts and conversations have in common. roles: whose messages the text must show."""
    if spec is not None and spec.vocab_size:
        check_ids(found, column, spec.vocab_size)
    found.exclude(_first_wrong(found, column, partial(_not_shown, roles)))
    if (special := special_tokens(tokenizer)) is not None:
        found.warn(_first_wrong(found, column, partial(_control_tokens, special)))
    found.warn(_first_wrong(found, column, _media))
    for file, names in found.ignored.items():
        found.warnings.general(f"{file} has the columns {', '.join(names)}: {_BLIND}")


def check_ids(found: RowSet, column: str, vocabulary: int) -> None:
    """Refuse ids that the model does not have."""
    cells: dict[int, Cell] = {}
    for index in range(len(found.places)):
        if (largest := max(found.tokens(index), default=0)) >= vocabulary:
            reason = (
                f"holds the token id {largest}, and the model has {vocabulary} (vocab_size): tokenizer and model do "
                "not belong together, or a token was added without a larger embedding"
            )
            cells[index] = (column, found.texts[index][:80], reason)
    found.exclude(cells)


def check_lengths(found: ConversationSet, config: Config, spec: ModelSpec | None) -> None:
    """Conversations fit into a micro-batch and the model's positions; `data.overlong` decides as for prompts."""
    policy, fix = config.policy, "shorten or remove such rows"
    multiple = sequence_multiple(policy)  # sequences are padded to it
    tokens = policy.chosen.micro_batch_tokens * policy.context_parallel_size // multiple * multiple
    rooms = [(tokens, "policy.micro_batch_tokens", f"raise it, or {fix}")]
    if spec is not None:
        rooms.append((spec.max_position_embeddings, "the model's max_position_embeddings", fix))
    for limit, key, fix in sorted(rooms, key=lambda room: room[0]):
        cells: dict[int, Cell] = {}
        for index in range(len(found.places)):
            if (length := len(found.tokens(index))) > limit:
                cells[index] = ("messages", found.texts[index][:80], f"{length} tokens, and {key} holds {limit}: {fix}")
        found.exclude(cells, "data.overlong", config.data.overlong)
        if cells and config.data.overlong == "refuse":
            return


def check_count(found: ConversationSet, config: Config) -> None:
    """There are enough conversations for a batch."""
    if config.sft is None or found.problems.lines:
        return
    size, count = config.sft.conversations_per_step, sum(found.rows.values()) - len(found.left_out)
    if count < size:
        found.problems.general(
            f"sft.conversations_per_step = {size}: {count} conversations cannot fill a batch; lower it to at most "
            f"{count}, or give more data"
        )


def check_answer_form(found: PromptSet, reward: RewardConfig) -> None:
    """Warn of rendered prompts that name no box where math_verify reads one."""

    def reads_a_box(prompt: Prompt) -> bool:
        return reward.by_source.get(prompt.data_source, reward.function).name == "math_verify"

    reason = (
        "the rendered prompt never names a box, and math_verify reads the answer in \\boxed{} alone: say so in "
        "data.system_prompt or the prompt, or set a reward.function that reads what the prompt asks for"
    )
    _warn_prompts(found, reason, lambda prompt, text: reads_a_box(prompt) and not _BOX.search(text))


def check_call_form(found: PromptSet, rollout: RolloutConfig) -> None:
    """Warn of rendered prompts that do not show the form of calls that the parser reads."""
    parser = make_parser(rollout)
    if not rollout.tools or rollout.max_turns < 2 or not hasattr(parser, "example"):
        return
    reason = (
        f"the rendered prompt does not show how to call a tool as rollout.tool_parser: {rollout.tool_parser.name} "
        "reads it, so calls of another form are final answers: set rollout.tool_parser: fenced, which a system prompt "
        "explains, or a model.chat_template that shows it"
    )
    _warn_prompts(found, reason, lambda _, text: not parser.mentions_call(text))


def _warn_prompts(found: PromptSet, reason: str, applies: Callable[[Prompt, str], bool]) -> None:
    found.warn(
        {
            index: ("prompt", found.prompts[index].messages[-1]["content"], reason)
            for index in _rendered(found)
            if applies(found.prompts[index], found.texts[index])
        }
    )


def check_held_out(found: PromptSet, training: PromptSet) -> None:
    """No held-out prompt is trained on, with its ground truth."""
    files = {(prompt.token_ids, prompt.answer): file for prompt, (file, _) in _placed(training)}
    duplicates: dict[tuple[Path, Path], list[int]] = {}
    for prompt, (file, row) in _placed(found):
        other = files.get((prompt.token_ids, prompt.answer))
        if other is not None:
            duplicates.setdefault((file, other), []).append(row)
    counts = Counter(file for file, _ in found.places)
    for (file, other), rows in duplicates.items():
        found.warnings.general(
            f"{file}: {len(rows):,} of {counts[file]:,} prompts are in {other} too, with their ground truth; the first "
            f"is row {rows[0]}: the accuracy there says nothing about other problems; leave them out of data.train"
        )


def _placed(found: PromptSet) -> Iterator[tuple[Prompt, tuple[Path, int]]]:
    return zip(found.prompts, found.places, strict=True)


def _rendered(found: RowSet) -> Iterable[int]:
    """Rows that the chat template did not refuse."""
    return (index for index, text in enumerate(found.texts) if text)


def _first_wrong(
    found: RowSet, column: str, rule: Callable[[Sequence[ChatMessage], str], WrongMessages]
) -> dict[int, Cell]:
    """The first wrong message of each rendered row, by its index. rule: of the messages of a row and their text."""
    cells: dict[int, Cell] = {}
    for index in _rendered(found):
        for message, reason in rule(found.messages[index], found.texts[index]):
            cells[index] = (column, message["content"], reason)
            break
    return cells


def _not_shown(roles: Sequence[str], messages: Sequence[ChatMessage], text: str) -> WrongMessages:
    """The text holds the text of every message of these roles, blanks and JSON's escapes aside."""
    text = _without_blanks(text)
    for at, message in enumerate(messages):
        if message["role"] in roles and (lost := _lost(message, text)):
            yield (
                message,
                f"the chat template does not show {lost} of message {at} ({message['role']}): set model.chat_template "
                "to one that does, or move the text to where it is shown",
            )


def _lost(message: ChatMessage, text: str) -> str:
    for key in ("content", "reasoning_content"):
        said = message.get(key) or ""
        plain, escaped = (_without_blanks(each) for each in (said, json.dumps(said, ensure_ascii=False)[1:-1]))
        if plain not in text and escaped not in text and _without_blanks(json.dumps(said)[1:-1]) not in text:
            return f"the {key}"
    return ""


def _without_blanks(text: str) -> str:
    return "".join(text.split())


def _control_tokens(special: re.Pattern[str], messages: Sequence[ChatMessage], _text: str) -> WrongMessages:
    """No field of a message holds the text of a control token: it stays text, which may not be what was meant."""
    for at, message in enumerate(messages):
        if hit := special.search(json.dumps(message, ensure_ascii=False)):
            yield (
                message,
                f"message {at} holds {hit[0]}, which is read as plain text, not as the control token; remove or "
                "rewrite it, or use the field that the chat template writes it for (such as tool_calls)",
            )


def _media(messages: Sequence[ChatMessage], _text: str) -> WrongMessages:
    """No message needs an image, a video or a sound, which are not read."""
    for message in messages:
        if hit := _MEDIA.search(message["content"]):
            yield message, f"names {hit[0]}: {_BLIND}"


def _words_of_tools(messages: Sequence[ChatMessage], _text: str) -> WrongMessages:
    """No assistant message holds the output of a tool, which would be trained on as the model's words."""
    for at, message in enumerate(messages):
        said = (message["content"], message.get("reasoning_content") or "") if message["role"] == "assistant" else ()
        if notation := next(filter(None, map(tool_output, said)), ""):
            yield (
                message,
                f"message {at} (assistant) holds a tool's output ({notation}), which would be trained on as the "
                "model's words; end the message before it, and put the output into a message of the role `tool`",
            )


_SAYS = r"(?:output|result|execution|response|observation|interpreter|stdout|stderr)"
_WHOSE = r"(?:tool|func|code|exec|program|python|sandbox|search|shell|bash|terminal)"
_CALLS = r"(?:code|python|tool|call|func|exec|action|search|command|shell|bash|sql|program|invoke)"
_PART = "[\\w\u2581:.-]{0,40}"
_BAR = "[|\uff5c]"


def _with(*words: str) -> str:
    """Matches a name that holds these words, in their order."""
    return _PART + _PART.join(words) + _PART


_OPEN, _SHUT = "\x02", "\x03"
"""Around the name of a fence, in place of the whole fence."""
_FENCE = re.compile(
    r"^[ \t]*(`{3,}|~{3,})[ \t]*([^\s`]*)[^\n`]*(?:\n(?:.*?\n)?[ \t]*\1[`~]*(?!\w)|\n.*\Z|\Z)", re.MULTILINE | re.DOTALL
)
_INLINE = re.compile(r"`[^`\n]+`")

_NAMES = rf"{_with(_WHOSE, '(?:output|result|response|observation)')}|{_with('interpreter')}|stdout|stderr"
_ANYWHERE = re.compile(
    rf"{_OPEN}(?:{_NAMES}){_SHUT}|<(?:{_NAMES})(?=[\s>])|\[(?:{_NAMES})\](?!\()|<{_BAR}(?:{_NAMES}|observation){_BAR}>",
    re.IGNORECASE,
)
"""Names that say whose output it is."""
_NAME = _with(_SAYS)
_AFTER_A_CALL = re.compile(
    rf"(?:{_SHUT}|</{_with(_CALLS)}>|\[/{_with(_CALLS)}\]|<{_BAR}{_with(_CALLS)}{_BAR}>)"
    rf"\s*(?:\**(?:\w+ )?{_SAYS}s?:?\**:?\s*)?"
    rf"(?P<notation>{_OPEN}{_NAME}{_SHUT}|<(?P<tag>{_NAME})(?=[\s>])(?=.*?</(?P=tag)>)"
    rf"|\[(?P<bracket>{_NAME})\](?=.*?\[/(?P=bracket)\])|<{_BAR}{_NAME}{_BAR}>)",
    re.IGNORECASE | re.DOTALL,
)
"""A program or a call, perhaps a line such as `Output:`, and a name that says output."""
_REACT = re.compile(r"^Action(?: Input)?:", re.MULTILINE), re.compile(r"^Observation:", re.MULTILINE)


def tool_output(text: str) -> str:
    """Return the notation of the first tool's output in a text of an assistant; "" without one.

    Notations are fences, tags, tags in brackets and tokens in bars: ```output (NuminaMath-TIR, ToRA), <interpreter>
    (ReTool), [TOOL_RESULTS] (Mistral), <|execute_result|>; and the observation of ReAct. They are known by their names.
    Code may show any of them, so what is in fences and backticks is left out.
    """
    outline = _INLINE.sub("", _FENCE.sub(lambda fence: f"{_OPEN}{fence[2]}{_SHUT}", text))
    if found := _ANYWHERE.search(outline):
        notation = found[0]
    elif found := _AFTER_A_CALL.search(outline):
        notation = found["notation"]
    else:
        called, answered = _REACT
        action = called.search(outline)
        return "Observation:" if action and answered.search(outline, action.end()) else ""
    if notation.startswith(_OPEN):
        return f"```{notation.strip(_OPEN + _SHUT)}"
    return f"{notation}>" if re.match(r"<\w", notation) else notation
