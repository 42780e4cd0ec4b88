"""Admission of data: one pass over every row, shared by dry run, training and `ctpo eval`; without torch.

Rows are rendered, compared with what the run was begun with (`rendering`), and checked (`row_checks`). Errors refuse,
doubts warn.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ctpo_megatron.base.files import DamagedFileError
from ctpo_megatron.base.installed import install_command, is_installed
from ctpo_megatron.config import (
    Config,
    ConfigError,
    DataConfig,
    Problem,
    RewardConfig,
    RolloutConfig,
    read_spec,
    spec_for,
)
from ctpo_megatron.environments import (
    MessageTemplate,
    TokenizerError,
    end_tokens,
    make_parser,
    needs_sandbox,
    offered_schemas,
    read_tokenizer,
    stop_token_ids,
    system_prompt,
)
from ctpo_megatron.models import ModelSpec
from ctpo_megatron.preflight.tokenizer_reader import different_to_others
from ctpo_sandbox.libraries import absent

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ctpo_megatron.data import ConversationSet, Prompt, PromptSet, RowSet
    from ctpo_megatron.preflight.rendering import Kind, Rendering

RowsT = TypeVar("RowsT", bound="RowSet")

_NEEDED = ("pyarrow", "transformers", "jinja2", "tokenizers")


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


@dataclass(frozen=True)
class Admission:
    """Reads every row of a configuration, and says what is wrong with it.

    spec: of the model; None: ids and lengths are not compared with it. rendering: of the run. taught: SFT shows the
    model how to call tools and to answer, so that prompts need not. limit: rows to read from each file. writes: keep
    what rows were rendered with.
    """

    config: Config
    tokenizer: PreTrainedTokenizerBase
    spec: ModelSpec | None
    rendering: Rendering
    taught: bool
    limit: int | None = None
    writes: bool = True

    @classmethod
    def of(cls, config: Config, directory: Path, *, taught: bool | None = None) -> Admission:
        """Of a run, or of `ctpo eval`, in `directory`.

        taught: None: if there is a supervised stage. Raises TokenizerError for a chat template or a tokenizer that
        cannot be used, DamagedFileError for `rendering.json`.
        """
        admission = cls._of(config, directory, taught=config.sft is not None if taught is None else taught)
        if problem := admission.problem():
            raise TokenizerError(problem)
        return admission

    @classmethod
    def planned(cls, config: Config, limit: int | None) -> Admission:
        """Of a dry run, which writes nothing. A run that would be resumed is compared with what it was begun with.

        Raises TokenizerError for a chat template that cannot render, DamagedFileError for `rendering.json`.
        """
        directory = config.run.directory if config.run.resume else None
        return cls._of(config, directory, taught=config.sft is not None, limit=limit, writes=False)

    @classmethod
    def _of(
        cls, config: Config, directory: Path | None, *, taught: bool, limit: int | None = None, writes: bool = True
    ) -> Admission:
        from ctpo_megatron.environments import chat_tokenizer
        from ctpo_megatron.preflight.rendering import Rendering

        tokenizer = chat_tokenizer(config.model, offered_schemas(config.data, config.rollout))
        rendering = Rendering.of(config, tokenizer, directory)
        return cls(config, tokenizer, _spec(config), rendering, taught, limit, writes)

    def training(self) -> PromptSet:
        """The prompts of `data.train`."""
        from ctpo_megatron.environments import training_prompts

        return self._prompts("train", training_prompts)

    def held_out(self, training: PromptSet | None = None) -> PromptSet:
        """The prompts of `data.eval`. training: of `data.train`, to compare them with."""
        from ctpo_megatron.environments import held_out_prompts
        from ctpo_megatron.preflight import row_checks

        found = self._prompts("eval", held_out_prompts)
        if training is not None:
            row_checks.check_held_out(found, training)
        return found

    def conversations(self) -> ConversationSet:
        """The conversations of `sft.data`."""
        from ctpo_megatron.data import ConversationRules, read_conversations
        from ctpo_megatron.preflight import row_checks

        config = self.config
        rules = ConversationRules(
            tool_schemas=offered_schemas(config.data, config.rollout),
            chat_template_kwargs=config.model.chat_template_kwargs,
            system_prompt=system_prompt(config.data, config.rollout),
            end_tokens=end_tokens(self.tokenizer, config.model.path),
            limit=self.limit,
            began=self.rendering.began,
        )
        with _uncollected():
            found = read_conversations(config.sft.data if config.sft else (), self.tokenizer, rules)
        self._rows("messages", found, ("system", "user", "tool", "assistant"))
        row_checks.check_own_words(found)
        row_checks.check_lengths(found, config, self.spec)
        row_checks.check_count(found, config)
        return self._admitted("sft", found)

    def problem(self) -> str:
        """Why no row could be used: end tokens or calls that would not be recognized; or ""."""
        from ctpo_megatron.preflight import row_checks

        model = self.config.model
        try:
            stops = sorted(stop_token_ids(self.tokenizer, model.path))
            MessageTemplate(self.tokenizer, model.chat_template_kwargs, stops).check_end()
        except TokenizerError as error:
            return str(error)
        return row_checks.check_call(self.tokenizer, self.config.rollout)

    def check_vocabulary(self) -> None:
        """Raises ConfigError for a tokenizer of more tokens than the model has."""
        if (found := len(self.tokenizer)) > (rows := spec_for(self.config).vocab_size):
            message = f"the tokenizer has {found} tokens, but the model's vocabulary {rows} (vocab_size in config.json)"
            fix = "resize the model's embeddings for the tokens that were added, or use the tokenizer it came with"
            raise ConfigError([Problem("model.path", message, fix, self.config.model.path)])

    def _compare_readers(self, found: PromptSet) -> None:
        """Whether vLLM, which reads what the directory names, has the ids of tokenizer.json."""
        path = self.config.model.path
        if difference := different_to_others(self.tokenizer, path):
            stops = hasattr(make_parser(self.config.rollout), "stop")  # which vLLM looks for in what it decodes
            (found.problems if stops else found.doubts).general(f"the tokenizer of {path}: {difference}")

    def _prompts(self, kind: Kind, read: Callable[..., PromptSet]) -> PromptSet:
        from ctpo_megatron.preflight import row_checks

        config = self.config
        with _uncollected():
            found = read(config, self.tokenizer, self.limit, self.rendering.began)
        self._compare_readers(found)
        self._rows("prompt", found, ("system", "user", "tool"))
        if not self.taught:
            row_checks.check_answer_form(found, config.reward)
            row_checks.check_call_form(found, config.rollout)
        return self._admitted(kind, found)

    def _rows(self, column: str, found: RowSet, roles: Sequence[str]) -> None:
        from ctpo_megatron.preflight import row_checks

        row_checks.check_rows(found, column, roles, self.tokenizer, self.spec)
        if needs_sandbox(self.config.rollout):
            row_checks.check_libraries(found, column, absent())

    def _admitted(self, kind: Kind, found: RowsT) -> RowsT:
        self.rendering.compare(kind, found)
        if self.writes and not found.problems.lines:
            self.rendering.write(kind, found)
        return found


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


def check_data(config: Config, limit: int | None) -> DataCheck:
    """Admit the first `limit` rows of every data file, or all, as training would. Imports no torch."""
    report = DataCheck(not_checked=_why_not(config))
    if report.not_checked:
        report.problems += check_prompts(config.rollout, _count(config.data))
        return report
    try:
        admission = Admission.planned(config, limit)
        if problem := admission.problem():
            report.problems.append(Problem("model.path", problem))
        _read(report, admission)
    except TokenizerError as error:
        report.problems.append(Problem("model.path", str(error)))
        report.not_checked = "the tokenizer cannot render prompts"
    except DamagedFileError as error:
        report.problems.append(Problem("run.resume", str(error)))
        report.not_checked = "what the run was begun with is unknown"
    return report


def _read(report: DataCheck, admission: Admission) -> None:
    config, found = admission.config, admission.training()
    _add(report, "data.train", found, config)
    _add_shares(report, config.data, config.rollout.prompts_per_step)
    _add_words(report, found, config.reward)
    report.problems += check_prompts(config.rollout, sum(found.rows.values()) or None)
    if found.places:
        report.first_prompt = found.texts[0]
        report.first = admission.tokenizer, found.prompts[0]
    if config.data.eval:
        held_out = admission.held_out(found)
        _add(report, "data.eval", held_out, config)
        _add_words(report, held_out, config.reward)
    if config.sft:
        _add(report, "sft.data", admission.conversations(), config)


def check_prompt_file(file: Path, model: Path, max_tokens: int) -> list[Problem]:
    """Return the problems of a prompt file for a model, whose prompts may have `max_tokens`. Raises TokenizerError."""
    from ctpo_megatron.data import PromptRules, read_prompts
    from ctpo_megatron.preflight import row_checks

    tokenizer = read_tokenizer(model)
    with _uncollected():
        found = read_prompts([str(file)], tokenizer, PromptRules(max_tokens))
    try:
        spec = read_spec(model)
    except ConfigError:  # of a family that is not ours: the ids are not compared
        spec = None
    row_checks.check_rows(found, "prompt", ("system", "user", "tool"), tokenizer, spec)
    return [
        *(Problem("", line) for line in found.problems.shown()),
        *(Problem("", line, severity="warning") for line in found.doubts.lines),
    ]


def _spec(config: Config) -> ModelSpec | None:
    """The model's; None where it cannot be read, which other checks report."""
    try:
        return spec_for(config)
    except ConfigError:
        return None


def _why_not(config: Config) -> str:
    if missing := [name for name in _NEEDED if not is_installed(name)]:
        return f"without {', '.join(missing)}: {install_command('train')}"
    return "" if Path(config.model.path).is_dir() else "there is no model directory"


def _count(data: DataConfig) -> int | None:
    """Rows of data.train; None where not all of it is there and can be read."""
    if not is_installed("pyarrow") or not all(Path(file).exists() for file in data.train_files):
        return None
    from ctpo_megatron.data import count_all_rows

    return count_all_rows(data.train_files)


def _add(report: DataCheck, key: str, found: RowSet, config: Config) -> None:
    report.problems += [Problem(key, line) for line in found.problems.shown() if not line.startswith("no such file:")]
    report.problems += [Problem(key, line, severity="warning") for line in found.doubts.lines]
    rows, read = sum(found.rows.values()), len(found.places) + len(found.left_out)
    files = f"{len(found.rows)} file{'s' * (len(found.rows) != 1)}"
    report.table.append((key, f"{rows:,} rows", files if read == rows else f"{files}; {read:,} {found.called} read"))
    if found.places:
        lengths = sorted(len(found.tokens(index)) for index in range(len(found.places)))
        shown = " / ".join(f"{value:,}" for value in _quantiles(lengths))
        of = f"min / median / 95% / max of a {found.called.removesuffix('s')}"
        limit = f"; data.max_prompt_tokens is {config.data.max_prompt_tokens:,}" if key != "sft.data" else ""
        report.table.append(("  tokens", shown, of + limit))
    for rule in sorted({each.rule for each in found.left_out}):
        those = [each for each in found.left_out if each.rule == rule]
        first = f"{rule}: drop; the first is {those[0].file.name} row {those[0].row}"
        report.table.append(("  left out", f"{len(those):,} rows", first))


def _add_shares(report: DataCheck, data: DataConfig, prompts_per_step: int) -> None:
    """Of each file in a mix."""
    if (weights := data.train_weights) is None:
        return
    for file, weight in zip(data.train_files, weights, strict=True):
        share = weight / sum(weights)
        report.table.append(("  share", f"{share:.1%}", f"{file}; {share * prompts_per_step:.1f} prompts a step"))


def _add_words(report: DataCheck, found: PromptSet, reward: RewardConfig) -> None:
    """Ground truths in words, of which some may say that there is no answer."""
    from ctpo_megatron.rewards import as_products, in_words, shown_words

    for what, letters in (("words", in_words), ("products", as_products)):
        if words := letters(found.prompts, reward):
            look = f"the most frequent of them: {shown_words(words)}"
            report.table.append((f"  {what} as ground truth", f"{words.total():,} rows", look))


def _quantiles(lengths: list[int]) -> list[int]:
    at = [0, len(lengths) // 2, int(0.95 * len(lengths)), len(lengths) - 1]
    return [lengths[min(index, len(lengths) - 1)] for index in at]


def check_prompts(rollout: RolloutConfig, count: int | None) -> list[Problem]:
    """Enough training prompts for a batch, given how many there are (None: that is not known)."""
    size = rollout.prompts_per_step
    if count is None or count >= size:
        return []
    times = f"a prompt is in a batch up to {-(-size // count)} times, each a group of its own with other seeds"
    message = f"is more than the {count} prompts of data.train: {times}"
    fix = "lower it, or give more data"
    return [Problem("rollout.prompts_per_step", message, fix, size, severity="warning")]
