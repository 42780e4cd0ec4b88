"""Writes the task: prompts, SFT conversations, a tokenizer trained on them, and a tiny model."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from ctpo_megatron.data import ChatMessage
from examples.prompt_file import MESSAGES, prompt_row, write_prompt_rows
from examples.toolmath.conversations import conversation
from examples.toolmath.families import CHOICES, FAMILIES, Family, Question, draw_problem
from examples.toolmath.settings import Task, TinyModel
from examples.toolmath.tokenizer import train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

_RECORD = "task.json"
_EXTRA = (("index", pa.int64()), ("split", pa.string()), ("family", pa.string()))
_OF_CHOICE = (("lesser_answer", pa.string()), ("worth", pa.float64()))
"""Of questions with an early choice: the answer after the lesser first call, and its reward."""


class TaskError(Exception):
    """A directory holds something else; the message says what."""


def write_task(task: Task, directory: Path) -> bool:
    """Write model/, train.parquet, heldout.parquet and sft.parquet; returns False where equal settings wrote them.

    Nothing is ever overwritten. Raises TaskError where the directory holds anything else, naming settings that differ.
    """
    if directory.exists():
        _check_equal(task, directory)
        return False
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as temporary:
        aside = Path(temporary) / directory.name
        aside.mkdir()
        _write(task, aside)
        (aside / _RECORD).write_text(task.model_dump_json(indent=2) + "\n", encoding="utf-8")
        aside.rename(directory)
    return True


def draw_problems(
    count: int, rng: Random, seen: set[str], *, distinct: bool = True, families: Sequence[Family] = FAMILIES
) -> list[Question]:
    """Return problems, the families in turn, without the questions in `seen`, which grows if `distinct`."""
    problems: list[Question] = []
    while len(problems) < count:
        problem = draw_problem(families[len(problems) % len(families)], rng)
        if problem.question not in seen:
            problems.append(problem)
            if distinct:
                seen.add(problem.question)
    return problems


def sft_conversations(task: Task, excluded: set[str]) -> list[list[ChatMessage]]:
    """Return the corrupted conversations of SFT, about questions that are not `excluded`, in random order."""
    rng = Random(f"{task.seed}/warmup")
    problems = draw_problems(task.sft_conversations, rng, excluded, distinct=False, families=_families(task))
    rng.shuffle(problems)
    said = (task.corruption, rng, task.tool_parser, task.early_choice)
    return [conversation(problem, *said) for problem in problems]


def _families(task: Task) -> Sequence[Family]:
    return FAMILIES if task.early_choice is None else CHOICES


def _write(task: Task, directory: Path) -> None:
    seen: set[str] = set()
    source = "toolmath" if task.early_choice is None else "early_choice"
    for split, count in (("heldout", task.heldout_prompts), ("train", task.train_prompts)):
        # Drawn first and excluded from the others: held-out questions occur neither in training nor in SFT.
        problems = draw_problems(count, Random(f"{task.seed}/{split}"), seen, families=_families(task))
        if split == "heldout":
            heldout = set(seen)
        rows = []
        for index, problem in enumerate(problems):
            identity, answer = f"{source}/{split}/{index}", str(problem.answer)
            extra: dict[str, Any] = {"index": index, "split": split, "family": problem.family.name}
            if task.early_choice is not None:
                extra |= {"lesser_answer": str(problem.lesser), "worth": task.early_choice.worth}
            rows.append(prompt_row(identity, source, problem.question, "math", answer, extra))
        columns = _EXTRA if task.early_choice is None else (*_EXTRA, *_OF_CHOICE)
        write_prompt_rows(rows, columns, directory / f"{split}.parquet")
    conversations = sft_conversations(task, heldout)
    table = pa.Table.from_pydict({"messages": conversations}, schema=pa.schema([("messages", MESSAGES)]))
    pq.write_table(table, directory / "sft.parquet")
    tokenizer = train_tokenizer(_plain_text(messages) for messages in conversations[: task.tokenizer_conversations])
    write_model(build_model(task.model, tokenizer, task.seed), tokenizer, directory / "model")


def build_model(shape: TinyModel, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Return a float32 model with random weights: equal arguments give equal ones, no global state changes."""
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
    """Write config.json, generation_config.json, model.safetensors and the tokenizer files to `directory`."""
    from transformers.utils import logging as transformers_logging

    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    transformers_logging.disable_progress_bar()  # it would break the display, for a megabyte
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _plain_text(messages: list[ChatMessage]) -> str:
    """The rendered text as BPE sees it: the role and the content on separate lines."""
    return "\n".join(f"{message['role']}\n{message['content']}" for message in messages)


def _check_equal(task: Task, directory: Path) -> None:
    """Raises TaskError where the directory was not written with these settings."""
    try:
        there = json.loads((directory / _RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TaskError(f"{directory} exists and holds no task ({error}); name another directory") from error
    old, new = _flat(there), _flat(task.model_dump(mode="json"))
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    if names:
        changes = "; ".join(f"{name} is {old.get(name)}, not {new.get(name)}" for name in names)
        raise TaskError(f"{directory} has other settings: {changes}. Delete it, or name another directory")


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
