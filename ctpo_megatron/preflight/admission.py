"""Admission of data: what a dry run reads of prompts, tokenizer and chat template, as training would; without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ctpo_megatron.config import Config, DataConfig, Problem, RolloutConfig, will_be_prepared

if TYPE_CHECKING:
    from ctpo_megatron.data import PromptSet

_NEEDED = ("pyarrow", "transformers", "jinja2", "tokenizers")


@dataclass
class DataCheck:
    """Problems of data and template; a table (key, figures, explanation); the text of the first prompt."""

    problems: list[Problem] = field(default_factory=list)
    table: list[tuple[str, str, str]] = field(default_factory=list)
    first_prompt: str = ""
    not_checked: str = ""
    """Why nothing was read, where nothing was."""


def check_data(config: Config, limit: int | None) -> DataCheck:
    """Read the first `limit` rows of every data file, or all, and render them as training would. Imports no torch."""
    report = DataCheck(not_checked=_why_not(config))
    if report.not_checked:
        report.problems += check_prompts(config.rollout, _count(config.data))
        return report
    from ctpo_megatron.environments.factory import offered_schemas
    from ctpo_megatron.environments.prompts import chat_tokenizer, held_out_prompts, training_prompts
    from ctpo_megatron.environments.tokenizer import TokenizerError

    try:
        tokenizer = chat_tokenizer(config.model, offered_schemas(config.data, config.rollout))
    except TokenizerError as error:
        report.problems.append(Problem("model.path", str(error)))
        report.not_checked = "the tokenizer cannot render prompts"
        return report
    found = training_prompts(config, tokenizer, limit)
    _add(report, "data.train", found, config.data)
    report.problems += check_prompts(config.rollout, sum(found.rows.values()) or None)
    report.first_prompt = found.texts[0] if found.texts else ""
    if config.data.eval:
        _add(report, "data.eval", held_out_prompts(config, tokenizer, limit), config.data)
    if config.sft:
        _add_conversations(report, config, tokenizer, limit)
    return report


def _why_not(config: Config) -> str:
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        return f"pip install {' '.join(missing)}"
    files = [*config.data.train, *config.data.eval, *(config.sft.data if config.sft else ())]
    paths = [Path(path) for path in (config.model.path, *files)]
    if any(will_be_prepared(config.prepare, path) and not path.exists() for path in paths):
        return "`prepare` has not written them yet"
    return "" if Path(config.model.path).is_dir() else "there is no model directory"


def _count(data: DataConfig) -> int | None:
    """Rows of data.train; None where not all of it is there and can be read."""
    if find_spec("pyarrow") is None or not all(Path(file).exists() for file in data.train):
        return None
    from ctpo_megatron.data import count_all_rows

    return count_all_rows(data.train)


def _add(report: DataCheck, key: str, found: PromptSet, data: DataConfig) -> None:
    report.problems += [Problem(key, line) for line in found.problems.shown() if not line.startswith("no such file:")]
    rows, read = sum(found.rows.values()), len(found.prompts) + len(found.left_out)
    files = f"{len(found.rows)} file{'s' * (len(found.rows) != 1)}"
    report.table.append((key, f"{rows:,} rows", files if read == rows else f"{files}; {read:,} prompts read"))
    if found.prompts:
        lengths = sorted(len(prompt.token_ids) for prompt in found.prompts)
        shown = " / ".join(f"{value:,}" for value in _quantiles(lengths))
        of = f"min / median / 95% / max of a prompt; data.max_prompt_tokens is {data.max_prompt_tokens:,}"
        report.table.append(("  tokens", shown, of))
    for rule in sorted({each.rule for each in found.left_out}):
        those = [each for each in found.left_out if each.rule == rule]
        first = f"{rule}: drop; the first is {those[0].file.name} row {those[0].row}"
        report.table.append(("  left out", f"{len(those):,} rows", first))


def _quantiles(lengths: list[int]) -> list[int]:
    at = [0, len(lengths) // 2, int(0.95 * len(lengths)), len(lengths) - 1]
    return [lengths[min(index, len(lengths) - 1)] for index in at]


def _add_conversations(report: DataCheck, config: Config, tokenizer: Any, limit: int | None) -> None:
    from ctpo_megatron.data import DataError, load_conversations
    from ctpo_megatron.environments.factory import offered_schemas, system_prompt

    if config.sft is None:
        return
    try:
        conversations = load_conversations(
            config.sft.data,
            tokenizer,
            tool_schemas=offered_schemas(config.data, config.rollout),
            chat_template_kwargs=config.model.chat_template_kwargs,
            system_prompt=system_prompt(config.data, config.rollout),
            limit=limit,
        )
    except DataError as error:
        lines = str(error).splitlines()
        report.problems += [Problem("sft.data", line.strip()) for line in (lines[1:] or lines)]
        return
    lengths = sorted(map(len, conversations))
    shown = " / ".join(f"{value:,}" for value in _quantiles(lengths))
    report.table.append(("sft.data", f"{len(conversations):,} conversations", f"tokens {shown}"))


def check_prompts(rollout: RolloutConfig, count: int | None) -> list[Problem]:
    """Enough training prompts for a batch, given how many there are (None: that is not known)."""
    size = rollout.prompts_per_step
    if count is None or count >= size:
        return []
    times = f"a prompt is in a batch up to {-(-size // count)} times, each a group of its own with other seeds"
    message = f"is more than the {count} prompts of data.train: {times}"
    fix = "lower it, or give more data"
    return [Problem("rollout.prompts_per_step", message, fix, size, severity="warning")]
