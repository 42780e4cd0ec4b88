"""Stage "prepare": writes the synthetic task's model, prompts and SFT conversations, once."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from ctpo_megatron.config import PrepareConfig, TinyModelConfig, flattened
from ctpo_megatron.data.messages import ChatMessage
from ctpo_megatron.data.problems import DataError
from ctpo_megatron.data.tables import MESSAGES, prompt_row, write_prompt_rows
from ctpo_megatron.data.toolmath.conversations import PROTOCOLS, conversation
from ctpo_megatron.data.toolmath.families import FAMILIES, Question, draw_problem
from ctpo_megatron.data.toolmath.tokenizer import train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

FORMAT = 2
"""Increased whenever equal settings would give other files, so that an old directory is not reused."""

_EXTRA = (("index", pa.int64()), ("split", pa.string()), ("family", pa.string()))


def prepare(config: PrepareConfig, tool_parser: str = "hermes") -> None:
    """Write model/, train.parquet, heldout.parquet and sft.parquet to `config.directory`.

    tool_parser: `rollout.tool_parser`, whose format the conversations use; hermes for a user's own parser. A directory
    that an equal configuration wrote is reused. Raises DataError when the directory holds anything else, naming the
    settings that differ; nothing is ever overwritten.
    """
    target = Path(config.directory)
    tool_parser = tool_parser if tool_parser in PROTOCOLS else "hermes"
    record = _record(config, tool_parser)
    if target.exists():
        _check_reusable(target, record)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as temporary:
        aside = Path(temporary) / target.name
        aside.mkdir()
        _write(config, tool_parser, aside)
        (aside / "prepare.json").write_text(json.dumps(record, indent=2) + "\n")
        try:
            aside.rename(target)
        except OSError:
            if not target.exists():
                raise
            # Another process published the same directory first; use it if its content fits.
            _check_reusable(target, record)


def _record(config: PrepareConfig, tool_parser: str) -> dict[str, Any]:
    """Content of prepare.json: all settings that the files depend on."""
    return {"format": FORMAT, "tool_parser": tool_parser, **config.model_dump(mode="json", exclude={"directory"})}


def draw_problems(count: int, rng: Random, seen: set[str], *, distinct: bool = True) -> list[Question]:
    """`count` problems, the families in turn, none of whose questions is in `seen` (which grows if `distinct`)."""
    problems: list[Question] = []
    while len(problems) < count:
        problem = draw_problem(FAMILIES[len(problems) % len(FAMILIES)], rng)
        if problem.question not in seen:
            problems.append(problem)
            if distinct:
                seen.add(problem.question)
    return problems


def sft_conversations(
    config: PrepareConfig, excluded: set[str], tool_parser: str = "hermes"
) -> list[list[ChatMessage]]:
    """The corrupted conversations of SFT, about questions that are not `excluded`, in random order."""
    if config.corruption.wrong_common + config.corruption.wrong_rare > 1:
        raise DataError("prepare.corruption: wrong_common + wrong_rare must not exceed 1")
    rng = Random(f"{config.seed}/warmup")
    problems = draw_problems(config.sft_conversations, rng, excluded, distinct=False)
    rng.shuffle(problems)
    return [conversation(problem, config.corruption, rng, tool_parser) for problem in problems]


def _write(config: PrepareConfig, tool_parser: str, directory: Path) -> None:
    seen: set[str] = set()
    for split, count in (("heldout", config.heldout_prompts), ("train", config.train_prompts)):
        # Drawn first and excluded from the others: held-out questions occur neither in training nor in SFT.
        problems = draw_problems(count, Random(f"{config.seed}/{split}"), seen)
        if split == "heldout":
            heldout = set(seen)
        rows = []
        for index, problem in enumerate(problems):
            identity, answer = f"toolmath/{split}/{index}", str(problem.answer)
            extra = {"index": index, "split": split, "family": problem.family.name}
            rows.append(prompt_row(identity, "toolmath", problem.question, "math", answer, extra))
        write_prompt_rows(rows, _EXTRA, directory / f"{split}.parquet")
    conversations = sft_conversations(config, heldout, tool_parser)
    table = pa.Table.from_pydict({"messages": conversations}, schema=pa.schema([("messages", MESSAGES)]))
    pq.write_table(table, directory / "sft.parquet")
    tokenizer = train_tokenizer(_plain_text(messages) for messages in conversations[: config.tokenizer_conversations])
    write_model(build_model(config.model, tokenizer, config.seed), tokenizer, directory / "model")


def build_model(shape: TinyModelConfig, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """A randomly initialized float32 model; equal arguments give equal weights, and global RNG state is untouched."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    multiple = shape.vocab_padding_multiple
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // multiple) * multiple,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        initializer_range=shape.initializer_range,
        tie_word_embeddings=shape.tie_word_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def write_model(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """config.json, generation_config.json, model.safetensors and the tokenizer files, in `directory`."""
    from transformers.utils import logging as transformers_logging

    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    transformers_logging.disable_progress_bar()  # it would break the display, for a megabyte
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _plain_text(messages: list[ChatMessage]) -> str:
    """The rendered text as BPE sees it: the role and the content on separate lines."""
    return "\n".join(f"{message['role']}\n{message['content']}" for message in messages)


def _check_reusable(target: Path, record: dict[str, Any]) -> None:
    try:
        found = json.loads((target / "prepare.json").read_text())
    except (OSError, ValueError) as error:
        raise DataError(
            f"prepare.directory: {target} exists but holds no prepared task ({error}); name another directory"
        ) from error
    old, new = dict(flattened(found)), dict(flattened(record))
    changes = [
        f"  {_key(key)}: {old.get(key, 'absent')} there, {new.get(key, 'absent')} wanted"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]
    if changes:
        listed = "\n".join(changes)
        raise DataError(
            f"prepare.directory: {target} was prepared with other settings;\n{listed}\n"
            "delete it or name another directory"
        )


def _key(name: str) -> str:
    """The configuration key of a name in prepare.json."""
    return f"rollout.{name}" if name == "tool_parser" else f"prepare.{name}"
