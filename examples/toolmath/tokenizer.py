"""A byte-level BPE tokenizer with Qwen's conventions, small enough for a model of a few hundred thousand weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TOOL_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
MAX_VOCABULARY = 512

# Letters with one leading mark, single digits, punctuation with one leading space, line ends, blanks.
_PIECES = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")

# Tool schemas are not rendered: a schema would be most of a prompt, and SFT teaches the model its only tool. So prompts
# look as in training, even for a client that sends `tools`. Calls and answers in the history are rendered as in SFT and
# RL.
CHAT_TEMPLATE = """\
{%- macro turn(role, text) %}{{ '<|im_start|>' + role + '\\n' + text + '<|im_end|>\\n' }}{% endmacro -%}
{%- macro call(function) -%}
  {{- '<tool_call>\\n{"name": ' + (function.name | tojson) + ', "arguments": ' }}
  {{- function.arguments if function.arguments is string else (function.arguments | tojson) }}
  {{- '}\\n</tool_call>' }}
{%- endmacro -%}
{%- for message in messages -%}
  {%- set content = message.content or '' -%}
  {%- if message.role == 'tool' -%}
    {%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
    {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' -}}
    {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
  {%- elif message.role == 'assistant' and message.tool_calls -%}
    {%- set parts = namespace(said=[content] if content else []) -%}
    {%- for tool_call in message.tool_calls -%}
      {%- set parts.said = parts.said + [call(tool_call.function or tool_call)] -%}
    {%- endfor -%}
    {{- turn('assistant', parts.said | join('\\n')) -}}
  {%- elif message.role != 'system' or loop.first -%}
    {{- turn(message.role, content) -}}
  {%- else -%}
    {{- raise_exception('a system message must come first') -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Train on rendered conversations; every digit stays a separate token, so numbers are copied digit by digit."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [END_OF_TEXT, TURN_START, TURN_END]
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCABULARY - len(TOOL_TAGS),
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=special,
    )
    tokenizer.train_from_iterator(_without_tags(texts), trainer)
    # Not "special", as in Qwen: a decoder that skips special tokens must still show where a tool was called.
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TOOL_TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        extra_special_tokens=[TURN_START],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _without_tags(texts: Iterable[str]) -> Iterable[str]:
    """Text as BPE sees it: tags are tokens already, so their letters must not create merges."""
    for text in texts:
        for tag in (TURN_START, TURN_END, *TOOL_TAGS):
            text = text.replace(tag, "\n")
        yield text
