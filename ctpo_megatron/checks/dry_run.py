"""All that is checked without starting anything: configuration, disk, users' parts, libraries, data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ctpo_megatron.base.files import DamagedFileError
from ctpo_megatron.base.installed import install_command, is_installed
from ctpo_megatron.checks.data_validation import DataValidation
from ctpo_megatron.checks.extensions import extension_problems
from ctpo_megatron.checks.sandboxes import check_libraries
from ctpo_megatron.config import (
    Config,
    ConfigError,
    Job,
    Problem,
    RewardConfig,
    Sources,
    accepted,
    check_sampling,
    check_training,
    failed,
    known_shapes,
    needs_engines,
    spec_for,
    warning,
)
from ctpo_megatron.environments import TokenizerError
from ctpo_megatron.models import ModelSpec
from ctpo_megatron.plan import check_cache, check_disk, check_gpu_memory, settled

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ctpo_megatron.data import Prompt, PromptSet, RowSet

ROWS = 1000
"""Rows of a data file that are checked unless all are asked for."""
_NEEDED = ("pyarrow", "transformers", "jinja2", "tokenizers")
"""Packages that read data and render prompts."""


def validate(
    config: Config, job: Job, *, sources: Sources | None = None, gpu_gib: float | None = None
) -> list[Problem]:
    """Apply the rules of training; returns the warnings, with file and line if `sources` know them.

    gpu_gib: refuse what a GPU of that size cannot hold. Raises ConfigError with all errors.
    """
    return accepted(_placed(_of_training(config, job, gpu_gib, None), sources))


def validate_sampling(config: Config, *, cuda: bool, sources: Sources | None = None) -> list[Problem]:
    """As `validate`, of what an evaluation without a trainer needs."""
    spec, problems = _spec(config)
    job = Job(1, cuda=cuda)
    return accepted(_placed([*problems, *check_cache(config, spec, job), *check_sampling(config, spec, job)], sources))


def _of_training(config: Config, job: Job, gpu_gib: float | None, shapes: ModelSpec | None) -> list[Problem]:
    """shapes: of the model, where neither the model nor the prompt files are there; rules of those are left out."""
    spec, problems = (shapes, list[Problem]()) if shapes else _spec(config)
    problems += [*check_training(config, spec, job, files=shapes is None), *check_cache(config, spec, job)]
    # The arithmetic of GPU memory needs a layout that fits ranks and model.
    if spec is not None and gpu_gib is not None and job.cuda and not failed(problems):
        problems += check_gpu_memory(settled(config, job, spec, gpu_gib), spec, job, gpu_gib)
    return problems


def _spec(config: Config) -> tuple[ModelSpec | None, list[Problem]]:
    """The model's, or why it cannot be read."""
    try:
        return spec_for(config), []
    except ConfigError as unreadable:
        return None, [*unreadable.problems]


def _placed(problems: Iterable[Problem], sources: Sources | None) -> list[Problem]:
    """The problems with the place of their keys."""
    return [*problems] if sources is None else [*map(sources.placed, problems)]


def check_start(
    config: Config,
    sources: Sources,
    job: Job,
    *,
    disk: bool = True,
    gpu_gib: float | None = None,
    shapes: ModelSpec | None = None,
) -> list[Problem]:
    """Configuration and users' parts, as every start checks them; on rank zero disk and libraries, too.

    disk: whether what is written has to fit here. gpu_gib: see `validate`. shapes: of the model, where neither the
    model nor the prompt files are there. Problems have file and line where they are known.
    """
    problems = _of_training(config, job, gpu_gib, shapes)
    if disk and not failed(problems):
        problems += check_disk(config, spec_for(config), count_rows(config.data.eval))
    found = _placed([*problems, *extension_problems(config)], sources)
    if (disk or shapes) and needs_engines(config):
        found += check_libraries(config.sandbox, config.rollout)
    return found


@dataclass
class DataCheck:
    """Problems of data and template; a table (key, figures, explanation); the text of the first prompt."""

    problems: list[Problem] = field(default_factory=list)
    table: list[tuple[str, str, str]] = field(default_factory=list)
    first_prompt: str = ""
    first: tuple[PreTrainedTokenizerBase, Prompt] | None = None
    """The tokenizer, and the first prompt of `data.train`; None where there is none."""
    not_checked: str = ""
    """Why nothing was read, where nothing was."""


def check_dry(
    config: Config,
    sources: Sources,
    job: Job,
    *,
    gpu_gib: float | None,
    shapes: ModelSpec | None = None,
    rows: int | None = ROWS,
) -> tuple[list[Problem], DataCheck]:
    """As `check_start`, with data and libraries. rows: of each file; None: all of them."""
    disk = shapes is None  # else the machine of the run is another
    problems = check_start(config, sources, job, disk=disk, gpu_gib=gpu_gib, shapes=shapes)
    if extension_problems(config):  # tools and parser decide how data are read
        return problems, DataCheck(not_checked="parts that it names cannot be used")
    if job.cuda and shapes is None and not Path(config.model.path).exists():
        advice = f", or plan without it: --shapes FILE ({', '.join(known_shapes())}, or a config.json)"
        problems = [replace(p, fix=p.fix + advice) if p.key == "model.path" else p for p in problems]
    if job.cuda and gpu_gib is not None and not failed(problems):
        config = settled(config, job, shapes or spec_for(config), gpu_gib)
    data = DataCheck(not_checked="--shapes") if shapes else check_data(config, rows)
    return problems + _placed(data.problems, sources), data


def check_data(config: Config, limit: int | None) -> DataCheck:
    """Validate the first `limit` rows of every data file, or all, as training would. Imports no torch."""
    report = DataCheck()
    if missing := [name for name in _NEEDED if not is_installed(name)]:
        report.not_checked = f"without {', '.join(missing)}: {install_command('train')}"
    elif not Path(config.model.path).is_dir():
        report.not_checked = "there is no model directory"
    if report.not_checked:
        report.problems += _check_count(config, count_rows(config.data.train_files))
        return report
    try:
        validation = DataValidation.of(config, limit=limit)
        if problem := validation.problem():
            report.problems.append(Problem("model.path", problem))
        _read(report, validation)
    except TokenizerError as error:
        report.problems.append(Problem("model.path", str(error)))
        report.not_checked = "the tokenizer cannot render prompts"
    except DamagedFileError as error:
        report.problems.append(Problem("run.resume", str(error)))
        report.not_checked = "what the run was begun with is unknown"
    return report


def _read(report: DataCheck, validation: DataValidation) -> None:
    config, found = validation.config, validation.training()
    _add(report, "data.train", found, config)
    if weights := config.data.train_weights:
        for file, share in zip(config.data.train_files, (weight / sum(weights) for weight in weights), strict=True):
            prompts = f"{share * config.rollout.prompts_per_step:.1f} prompts a step"
            report.table.append(("  share", f"{share:.1%}", f"{file}; {prompts}"))
    _add_words(report, found, config.reward)
    report.problems += _check_count(config, sum(found.rows.values()))
    if found.places:
        report.first_prompt = found.texts[0]
        report.first = validation.tokenizer, found.prompts[0]
    if config.data.eval:
        held_out = validation.held_out(found)
        _add(report, "data.eval", held_out, config)
        _add_words(report, held_out, config.reward)
    if config.sft:
        _add(report, "sft.data", validation.conversations(), config)


def count_rows(files: Sequence[str]) -> int | None:
    """Rows of data files; None where not all of them are there and can be read."""
    if not files:
        return 0
    if not is_installed("pyarrow") or not all(Path(file).exists() for file in files):
        return None
    from ctpo_megatron.data import count_all_rows

    return count_all_rows(files)


def _add(report: DataCheck, key: str, found: RowSet, config: Config) -> None:
    lines = [line.removeprefix(f"{key} ") for line in found.problems.shown()]
    report.problems += [Problem(key, line) for line in lines if not line.startswith("no such file:")]
    report.problems += [Problem(key, line, severity="warning") for line in found.warnings.lines]
    rows, read = sum(found.rows.values()), len(found.places) + len(found.left_out)
    files = f"{len(found.rows)} file{'s' * (len(found.rows) != 1)}"
    report.table.append((key, f"{rows:,} rows", files if read == rows else f"{files}; {read:,} {found.called} read"))
    for name, each in found.hub.items():
        if each.files:
            where = f"{', '.join(map(str, each.files))}, of commit {each.commit[:12]}"
            report.table.append(("  of the Hub", f"{len(each.files)} files", f"{name}: {where}"))
    if found.places:
        lengths = sorted(len(found.tokens(index)) for index in range(len(found.places)))
        ranks = (0, len(lengths) // 2, int(0.95 * len(lengths)), -1)
        shown = " / ".join(f"{lengths[rank]:,}" for rank in ranks)
        of = f"min / median / 95% / max of a {found.called.removesuffix('s')}"
        limit = f"; data.max_prompt_tokens is {config.data.max_prompt_tokens:,}" if key != "sft.data" else ""
        report.table.append(("  tokens", shown, of + limit))
    for rule in sorted({each.rule for each in found.left_out}):
        those = [each for each in found.left_out if each.rule == rule]
        first = f"{rule}: drop; the first is {those[0].file.name} row {those[0].row}"
        report.table.append(("  left out", f"{len(those):,} rows", first))


def _add_words(report: DataCheck, found: PromptSet, reward: RewardConfig) -> None:
    """Ground truths in words, of which some may say that there is no answer."""
    from ctpo_megatron.rewards import as_products, in_words, shown_words

    for what, letters in (("words", in_words), ("products", as_products)):
        if words := letters(found.prompts, reward):
            look = f"the most frequent of them: {shown_words(words)}"
            report.table.append((f"  {what} as ground truth", f"{words.total():,} rows", look))


def _check_count(config: Config, count: int | None) -> Iterator[Problem]:
    """Enough training prompts for a batch, given how many there are (None: that is not known)."""
    size = config.rollout.prompts_per_step
    if count and count < size:
        times = f"a prompt is in a batch up to {-(-size // count)} times, each a group of its own with other seeds"
        message = f"is more than the {count} prompts of data.train: {times}"
        yield warning(config, "rollout.prompts_per_step", message, "lower it, or give more data")
