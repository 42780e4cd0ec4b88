"""The prompts of a run: read, rendered, with checked ground truths; rows left out are logged and recorded."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctpo_megatron.base.files import write_json
from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.config import Config, ModelConfig, RewardConfig
from ctpo_megatron.data import Cell, Prompt, PromptRules, PromptSet, RowSet, read_prompts
from ctpo_megatron.environments.factory import offered_schemas, system_prompt
from ctpo_megatron.environments.protocol import Schema
from ctpo_megatron.environments.tokenizer import check_chat_template, read_tokenizer, use_chat_template
from ctpo_megatron.rewards import unverifiable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


def chat_tokenizer(model: ModelConfig, offered: Sequence[Schema]) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a run, with the chat template that the run trains with.

    offered: `factory.offered_schemas`. Raises TokenizerError when the template renders nothing, or omits these tools.
    """
    tokenizer = read_tokenizer(model.path)
    use_chat_template(tokenizer, model)
    check_chat_template(tokenizer, model, offered)
    return tokenizer


def training_prompts(config: Config, tokenizer: PreTrainedTokenizerBase, **reading: Any) -> PromptSet:
    """Return the prompts of `data.train`, and the rows that `data.overlong` and `data.unverifiable` leave out.

    reading: `limit`, `began` and `hub` of `RowRules`.
    """
    data = config.data
    found = read_prompts(data.train_files, tokenizer, _rules(config, overlong=data.overlong, **reading))
    found.exclude(_ground_truths(found, config.reward), "data.unverifiable", data.unverifiable)
    if not found.prompts and not found.problems.lines:
        found.problems.general(f"every prompt was left out; the first: {found.left_out[0].reason}")
    if (weights := data.train_weights) and not found.problems.lines:
        for file, weight, prompts in zip(data.train_files, weights, found.mix(data.train_files), strict=True):
            if weight and not prompts:
                found.problems.general(f"{file} has weight {weight:g}, and no prompts; set it to 0, or give it some")
    return found


def held_out_prompts(config: Config, tokenizer: PreTrainedTokenizerBase, **reading: Any) -> PromptSet:
    """Return all prompts of `data.eval`: without some of its rows it would be another benchmark.

    If `data.unverifiable` is `drop`, prompts that no answer can match are kept, score 0, and are logged. reading: as of
    `training_prompts`.
    """
    found = read_prompts(config.data.eval, tokenizer, _rules(config, held_out=True, **reading))
    cells = _ground_truths(found, config.reward)
    if config.data.unverifiable == "refuse":
        found.exclude(cells, "data.unverifiable")
    elif cells:
        names = ", ".join(found.prompts[index].id for index in cells)
        log.warning("%d of %d evaluation prompts score 0 for any answer: %s", len(cells), len(found.prompts), names)
    return found


def usable(found: PromptSet) -> list[Prompt]:
    """Return the prompts of a set without problems; warnings and rows left out go to the log. Raises DataError with
    all.
    """
    log_left_out(found)
    return found.prompts


def write_record(found: PromptSet, directory: Path) -> None:
    """Write `<directory>/data.json`: the rows of the files, and those that were left out."""
    used = Counter(file for file, _ in found.places)
    files = {str(file): {"rows": rows, "used": used[file]} for file, rows in found.rows.items()}
    left_out = [{**asdict(row), "file": str(row.file)} for row in found.left_out]
    write_json(RunPaths(directory).data, {"files": files, "left_out": left_out})


def log_left_out(found: RowSet) -> None:
    """Log the warnings of a set, and the rows that were left out. Raises DataError with all problems."""
    total = len(found.places) + len(found.left_out)
    for rule, count in Counter(each.rule for each in found.left_out).items():
        first = next(each for each in found.left_out if each.rule == rule)
        log.warning(
            "%s: drop left out %d of %d %s, first %s row %d: %s",
            *(rule, count, total, found.called, first.file, first.row, first.reason),
        )
    for line in found.warnings.lines:
        log.warning("%s", line)
    found.problems.raise_if_any()


def _rules(config: Config, **rules: Any) -> PromptRules:
    return PromptRules(
        max_prompt_tokens=config.data.max_prompt_tokens,
        tool_schemas=offered_schemas(config.data, config.rollout),
        system_prompt=system_prompt(config.data, config.rollout),
        chat_template_kwargs=config.model.chat_template_kwargs,
        **rules,
    )


def _ground_truths(found: PromptSet, reward: RewardConfig) -> dict[int, Cell]:
    """Prompts that no answer can match."""
    return {
        index: ("reward_model", found.prompts[index].answer, f"the ground truth {reason}")
        for index, reason in unverifiable(found.prompts, reward).items()
    }
