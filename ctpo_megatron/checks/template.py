"""How the model is shown tools and calls them: parser, system prompt, chat template, and the tokens of an episode."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctpo_megatron.base.extensions import ExtensionError, activate
from ctpo_megatron.config import (
    Config,
    Problem,
    error,
    passed,
    task_command,
    tokenizer_problems,
)
from ctpo_megatron.environments import (
    Message,
    MessageTemplate,
    TokenizerError,
    check_chat_template,
    example_call,
    make_parser,
    offered_schemas,
    read_tokenizer,
    stop_token_ids,
    system_prompt,
    tool_schemas,
    use_chat_template,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_QUESTION = {"role": "user", "content": "What is 6 times 7?"}
_SHOWN = 40
"""Tokens of either side behind a difference."""
_NAME = "chat template"
_NO_THOUGHT = "<think>\n\n</think>\n\n"
_FIX = (
    "use a template that keeps the history as it was said: model.chat_template: qwen3, or a .jinja file; without it "
    "SFT refuses such conversations, and the served model reads another history than in training"
)


@dataclass(frozen=True)
class SampleEpisode:
    """A short episode. parts: (title, text) of prompt, call and answer. built: its token ids. whole: the template's."""

    parts: tuple[tuple[str, str], ...]
    built: list[int]
    whole: list[int]


def check_template(config: Config) -> tuple[list[Problem], tuple[tuple[str, str], ...]]:
    """Return what is found on the chat template of a configuration, and the texts of a sample episode. Loads no
    torch.
    """
    if missing := tokenizer_problems(Path(config.model.path)):
        command = task_command(Path(config.model.path))
        fix = f"{command} writes it" if command else "give model.path"
        return [Problem(_NAME, str(problem), fix) for problem in missing], ()
    activate(config.extensions.path or ())
    try:
        tokenizer = read_tokenizer(config.model.path)
        use_chat_template(tokenizer, config.model)
        check_chat_template(tokenizer, config.model, offered_schemas(config.data, config.rollout))
        # Templates of thinking models begin a turn with an empty thought where the model had none.
        plain, thinking = (_sample(config, tokenizer, begin) for begin in ("", _NO_THOUGHT))
    except OSError as unreadable:
        problem = error(config, "model.chat_template", f"cannot be read: {unreadable.strerror}")
        return [Problem(_NAME, str(problem))], ()
    except (TokenizerError, ExtensionError) as refused:
        return [Problem(_NAME, str(refused))], ()
    same = next((sample for sample in (plain, thinking) if sample.built == sample.whole), None)
    if same is None:
        return [Problem(_NAME, _difference(plain, tokenizer), _FIX)], plain.parts
    text = f"{len(same.built)} tokens, as an episode builds them and as the template writes them"
    return [passed(_NAME, text if same is plain else f"{text}, for turns that begin with thinking")], same.parts


def _sample(config: Config, tokenizer: PreTrainedTokenizerBase, begin: str) -> SampleEpisode:
    """What an episode records of a prompt, a call and its answer, and what the template makes of the same messages.

    begin: what the model says before the call.
    """
    parser, tools = make_parser(config.rollout), offered_schemas(config.data, config.rollout)
    messages = list(system_prompt(config.data, config.rollout).before([_QUESTION]))
    said, call = example_call(parser)
    said, answer = begin + said, parser.render([call])
    stops, kwargs = stop_token_ids(tokenizer, config.model.path), config.model.chat_template_kwargs
    template = MessageTemplate(tokenizer, kwargs, sorted(stops), tool_schemas(config.rollout))

    def rendered(conversation: Sequence[dict[str, Any]]) -> str:
        offer = {"tools": [dict(tool) for tool in tools] or None, **kwargs}
        try:
            return str(
                tokenizer.apply_chat_template(list(conversation), tokenize=False, add_generation_prompt=True, **offer)
            )
        except Exception as error:  # templates raise what they like
            raise TokenizerError(f"the chat template refuses a {conversation[-1]['role']} message: {error}") from error

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    prompt, shown = rendered(messages), template.encode(answer, end_turn=True)
    whole = rendered([*messages, {"role": "assistant", "content": said}, *map(_plain, answer)])
    parts = (("prompt", prompt), ("call", said), ("answer", str(tokenizer.decode(shown))))
    return SampleEpisode(parts, [*ids(prompt), *ids(said), *shown], ids(whole))


def _plain(message: Message) -> dict[str, Any]:
    tool = {"name": message.name, "tool_call_id": "call00000"} if message.role == "tool" else {}
    return {"role": message.role, **tool, "content": message.content}


def _difference(sample: SampleEpisode, tokenizer: PreTrainedTokenizerBase) -> str:
    """Where the two begin to differ, and the continuation of each."""
    pairs = zip(sample.built, sample.whole, strict=False)
    at = next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(sample.built), len(sample.whole)))
    built, whole = (repr(tokenizer.decode(ids[at : at + _SHOWN])) for ids in (sample.built, sample.whole))
    before = repr(tokenizer.decode(sample.built[max(0, at - _SHOWN // 4) : at]))
    return f"from token {at} on, after {before}, an episode has {built}, and the template writes {whole}"
