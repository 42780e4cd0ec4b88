"""What a run writes, per step and in all, and whether the disk has room for it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ctpo_megatron.config import Config, Problem, error, evaluates, passed, value_of
from ctpo_megatron.config.schema import CheckpointConfig, auto_interval_s
from ctpo_megatron.models import ModelSpec
from ctpo_megatron.plan.memory import ELEMENT_BYTES, GIB, TableRow, model_parameters

TOKEN_BYTES = 8
"""Of a dump, text included (docs/reference/dumps.md)."""
RATIO_BYTES = 8
"""Of a token of a dump that has log r and its bounds."""
FILE_BYTES = 16 << 10
"""Of a dump without any token: names, places and sizes of the columns."""
AHEAD_BYTES = 8
"""A token that was sampled ahead, in a checkpoint."""
STEP_BYTES = 72 << 10
"""Metrics, statistics by position, events of TensorBoard and logs of a step."""
REPORT_BYTES = 3 << 20
"""The page and its figures."""
PROMPT_TOKENS = 512
"""Longest prompt that is expected where longer ones are allowed: few data sets use all of `data.max_prompt_tokens`."""
EXPECTED_SHARE = 0.5
"""Of `rollout.max_response_tokens`, the mean length that is expected."""
WRITE_SPEED = 1e9
"""Bytes per second at which a checkpoint is expected to be written."""
_SAMPLE = 8
"""Prompts of `tracking.trajectories: sample`."""


class DiskNeeds(NamedTuple):
    """What a run writes into a folder.

    once: bytes without which it fails. whole: bytes in the end; parts: of what; key, fix: what would make it less.
    """

    folder: str
    once: float
    whole: float
    parts: str = ""
    key: str = "run.root"
    fix: str = "another folder"


@dataclass(frozen=True)
class DiskUse:
    """Files of one kind. each: bytes of one of them; count: how many there are in the end; key: what changes it."""

    what: str
    each: float
    count: int
    why: str
    key: str
    fix: str

    @property
    def total(self) -> float:
        """Bytes in the end."""
        return self.each * self.count


def checkpoint_bytes(config: Config, spec: ModelSpec) -> float:
    """Return the bytes of a checkpoint: what is sampled ahead, weights, two moments and, below float32, a copy of the
    weights.
    """
    element = ELEMENT_BYTES[config.policy.dtype]
    state = model_parameters(spec)[0] * (element + 8 + (4 if config.policy.dtype != "float32" else 0))
    rollout = config.rollout
    ahead = rollout.ahead * rollout.prompts_per_step * rollout.samples_per_prompt
    return state + ahead * expected_tokens(config) * (AHEAD_BYTES + choice_bytes(config, spec))


def choice_bytes(config: Config, spec: ModelSpec) -> int:
    """Of a token whose experts are recorded: one for each layer and choice, two above 256 experts."""
    if not config.policy.router_replay:
        return 0
    return spec.num_layers * spec.num_experts_per_token * (1 if spec.num_experts <= 256 else 2)


def expected_tokens(config: Config) -> float:
    """Tokens of a trajectory, prompt included. A guess: no more than twice, and seldom less than a third of it."""
    return min(config.data.max_prompt_tokens, PROMPT_TOKENS) + EXPECTED_SHARE * config.rollout.max_response_tokens


def evaluations(config: Config) -> int:
    """Evaluations of a whole run."""
    steps = config.run.steps
    return sum(config.eval.due(done, steps) for done in range(steps + 1)) if evaluates(config) else 0


def disk_use(config: Config, spec: ModelSpec, held_out: int | None) -> list[DiskUse]:
    """Return everything that grows with steps, and what is as large. held_out: prompts of `data.eval`; None:
    not known.
    """
    kept, steps, count = config.checkpoint, config.run.steps, model_parameters(spec)[0]
    uses = list(_dumps(config, spec, held_out))
    if saves := min(kept.keep_last + kept.keep_best + 1, _saves(kept, steps)):
        why = f"{kept.keep_last} of keep_last, {kept.keep_best} of keep_best, one that is written"
        fix = "keep fewer"
        one = checkpoint_bytes(config, spec)
        uses.append(DiskUse("checkpoints", one, saves, why, "checkpoint.keep_last", f"{fix}, or another run.root"))
    model = count * ELEMENT_BYTES[config.policy.dtype]
    if config.sft:
        uses.append(DiskUse("SFT model", model, 1, "weights", "sft", "delete sft_model/ once RL has a checkpoint"))
    if config.export.enabled:
        uses.append(DiskUse("export", model, 1, "weights", "export.enabled", "ctpo export makes it later"))
    logs = "metrics, TensorBoard, logs"
    uses.append(DiskUse("logs", STEP_BYTES, steps, logs, "tracking.trackers", "fewer write less"))
    if config.tracking.report:
        uses.append(DiskUse("report", REPORT_BYTES, 1, "page and figures", "tracking.report", "ctpo report makes it"))
    return uses


def _saves(checkpoint: CheckpointConfig, steps: int) -> int:
    """Most checkpoints that a run of `steps` steps writes."""
    if checkpoint.every == "auto":
        return steps
    return steps // checkpoint.every + 2 if checkpoint.every else min(steps, 1)


def crash_line(config: Config, spec: ModelSpec) -> str:
    """Return what a run loses at most when it is killed without notice, by `checkpoint.every`."""
    every, steps = config.checkpoint.every, config.run.steps
    if every == "auto":
        size = checkpoint_bytes(config, spec)
        write_s = size / WRITE_SPEED
        lost = f"{auto_interval_s(write_s) / 60:.0f} minutes and the step after them"
        why = f"auto; writing {_shown(size)} takes {write_s:.3g} s at {WRITE_SPEED / 1e9:g} GB/s"
    else:
        lost = f"{min(every, steps)} steps" if every else f"all {steps} steps"
        why = f"{every}; a checkpoint after the last step alone" if not every else f"{every}"
    return f"a crash loses at most {lost} (checkpoint.every: {why})"


def _dumps(config: Config, spec: ModelSpec, held_out: int | None) -> Iterator[DiskUse]:
    """Trajectories of steps, and held-out answers."""
    tracking, rollout, tokens = config.tracking, config.rollout, expected_tokens(config)
    of_one = f"x {tokens:,.0f} tokens x {TOKEN_BYTES} B"
    prompts = {"all": rollout.prompts_per_step, "sample": min(_SAMPLE, rollout.prompts_per_step), "none": 0}
    if count := prompts[tracking.trajectories] * rollout.samples_per_prompt:
        size = count * tokens * TOKEN_BYTES + FILE_BYTES
        key, fix = "tracking.trajectories", "sample or none writes less"
        yield DiskUse("trajectories", size, config.run.steps, f"{count:,} trajectories {of_one}", key, fix)
        if choice := choice_bytes(config, spec):
            why = f"{count:,} trajectories x {tokens:,.0f} tokens x {choice} B"
            yield DiskUse("experts", count * tokens * choice, config.run.steps, why, key, fix)
        dumped, ratio = min(config.run.steps, config.run.steps // tracking.dump_every + 2), RATIO_BYTES
        why = f"{count:,} trajectories x {tokens:,.0f} tokens x {ratio} B"
        yield DiskUse("ratios", count * tokens * ratio, dumped, why, "tracking.dump_every", "a larger one writes less")
    if times := evaluations(config):
        count = (held_out or 0) * config.eval.samples
        size = count * tokens * TOKEN_BYTES + FILE_BYTES
        why = f"{count:,} answers {of_one}" if held_out else "not counted: data.eval cannot be read yet"
        yield DiskUse("held-out answers", size, times, why, "eval.every", "evaluate less often, or fewer samples")


def unwritable(folder: Path) -> str:
    """Return why a folder cannot be made, or written to; else ""."""
    there = _existing(folder.absolute())
    if not there.exists():
        return f"{there} is a link to nothing"
    if not there.is_dir():
        return f"{there} is a file"
    closed = not os.access(there, os.W_OK | os.X_OK, effective_ids=True)
    return f"{there} cannot be written to" if closed else ""


def _existing(folder: Path) -> Path:
    """The folder, or the nearest of those around it that is there."""
    return next(path for path in (folder, *folder.parents) if os.path.lexists(path))


def disk_table(uses: Sequence[DiskUse]) -> list[TableRow]:
    """Rows (what, size in the end, how it follows), and their sums per step and in all."""
    rows = [(use.what, _shown(use.total), f"{use.count:,} x {_shown(use.each)}: {use.why}") for use in uses]
    grows = [use for use in uses if use.what in ("trajectories", "experts", "ratios", "held-out answers", "logs")]
    steps = next(use.count for use in uses if use.what == "logs")
    return [
        *rows,
        ("a step", _shown(sum(use.total for use in grows) / max(steps, 1)), "what grows with the steps, on average"),
        ("the run", _shown(sum(use.total for use in uses)), "in the end"),
    ]


def disk_needs(config: Config, spec: ModelSpec, held_out: int | None) -> DiskNeeds:
    """Check the sum of a run; the remedy names the largest part. held_out: see `disk_use`."""
    uses = disk_use(config, spec, held_out)
    largest = max(uses, key=lambda use: use.total)
    once = max((use.each for use in uses if use.what == "checkpoints"), default=0.0)
    parts = ", ".join(f"{use.what} {_shown(use.total)}" for use in uses if use.total > GIB / 10) or "files"
    return DiskNeeds(str(config.run.directory), once, sum(use.total for use in uses), parts, largest.key, largest.fix)


def disk_problem(name: str, needs: DiskNeeds) -> Problem:
    """Compare the free disk with what a run writes; what it has written before counts as free."""
    folder = Path(needs.folder).absolute()
    there = _existing(folder)
    if why := unwritable(folder):
        return Problem(name, why, "another run.root, or chmod")
    free = shutil.disk_usage(there).free
    room, fix = f"{_shown(free)} free", f"free some, another run.root, or {needs.key}: {needs.fix}"
    if there == folder and (written := _size(folder)) > GIB / 10:
        room, free = f"{room} and {_shown(written)} of this run", free + written
    if free < needs.once:
        return Problem(name, f"{room}, but one checkpoint takes {_shown(needs.once)}", fix)
    if free < needs.whole:
        message = f"{room}, but the run writes {_shown(needs.whole)}: {needs.parts}"
        return Problem(name, message, fix, severity="warning")
    return passed(name, f"{room}, the run writes {_shown(needs.whole)}" if needs.parts else room)


def check_disk(config: Config, spec: ModelSpec | None, held_out: int | None) -> Iterator[Problem]:
    """Yield folders that cannot be made or written to, and disks on which the run ends, or that it fills.

    held_out: see `disk_use`.
    """
    if why := unwritable(config.run.directory):
        yield error(config, "run.root", why, "give a folder that can be made and written to")
    elif spec is not None:
        needs = disk_needs(config, spec, held_out)
        found = disk_problem(f"disk of {needs.folder}", needs)
        if found.severity != "ok":
            message = f"{found.key}: {found.message}"
            yield replace(found, key=needs.key, value=value_of(config, needs.key), message=message)


def _size(folder: Path) -> int:
    sizes = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                sizes += os.lstat(os.path.join(path, name)).st_size
            except OSError:  # it was deleted meanwhile
                continue
    return sizes


def _shown(size: float) -> str:
    """Bytes with three digits: logs of a step have kilobytes, checkpoints terabytes."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:,.0f} PiB"
