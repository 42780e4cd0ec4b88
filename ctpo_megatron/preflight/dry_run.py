"""All that is checked without starting anything: configuration, disk, users' parts, libraries, data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ctpo_megatron.config import Config, ConfigError, Job, Problem, Sources, known_shapes, needs_engines, spec_for
from ctpo_megatron.models import ModelSpec
from ctpo_megatron.preflight.admission import DataCheck, check_data
from ctpo_megatron.preflight.check import RunContext, failed, place, warnings_of
from ctpo_megatron.preflight.choice import settled
from ctpo_megatron.preflight.configuration import validate
from ctpo_megatron.preflight.disk import check_disk
from ctpo_megatron.preflight.extensions import check_extensions
from ctpo_megatron.preflight.machine import check_libraries

ROWS = 1000
"""Rows of a data file that are checked unless all are asked for."""


@dataclass
class Findings:
    """What checks of a configuration found, with file and line where they are known."""

    problems: list[Problem] = field(default_factory=list)
    warnings: list[Problem] = field(default_factory=list)
    parts_usable: bool = True

    def take(self, check: Callable[[], Iterable[Problem] | None]) -> bool:
        """Run a check, which may return warnings; returns whether it passed.

        What it raises is kept as problems, so that all are found at once.
        """
        try:
            self.warnings += check() or ()
        except ConfigError as error:
            self.problems += error.problems
            return False
        return True

    def raise_if_any(self, earlier: Sequence[Problem] = ()) -> None:
        """Raises ConfigError with all problems. earlier: found before these checks."""
        if problems := [*earlier, *self.problems]:
            raise ConfigError(problems)


def check_start(
    config: Config,
    sources: Sources,
    job: Job,
    *,
    cuda: bool,
    disk: bool = True,
    gpu_gib: float | None = None,
    shapes: ModelSpec | None = None,
) -> Findings:
    """Configuration and users' parts, as every start checks them; on rank zero disk and libraries, too.

    disk: whether what is written has to fit here. gpu_gib, shapes: see `validate`.
    """
    found = Findings()
    valid = found.take(lambda: validate(config, job, cuda=cuda, sources=sources, gpu_gib=gpu_gib, shapes=shapes))
    if disk and valid:
        found.take(lambda: warnings_of(check_disk(RunContext(config, spec_for(config))), sources))
    found.parts_usable = found.take(lambda: check_extensions(config, sources))
    if (disk or shapes) and needs_engines(config):
        found.take(lambda: check_libraries(config.sandbox, config.rollout))
    return found


def check_dry(
    config: Config,
    sources: Sources,
    job: Job,
    *,
    cuda: bool,
    gpu_gib: float | None,
    shapes: ModelSpec | None = None,
    rows: int | None = ROWS,
) -> tuple[Findings, DataCheck]:
    """As `check_start`, with data and libraries. rows: of each file; None: all of them."""
    disk = shapes is None  # else the machine of the run is another
    found = check_start(config, sources, job, cuda=cuda, disk=disk, gpu_gib=gpu_gib, shapes=shapes)
    if not found.parts_usable:  # tools and parser decide how data are read
        return found, DataCheck(not_checked="parts that it names cannot be used")
    if cuda and shapes is None and not Path(config.model.path).exists():
        advice = f", or plan without it: --shapes FILE ({', '.join(known_shapes())}, or a config.json)"
        found.problems = [replace(p, fix=p.fix + advice) if p.key == "model.path" else p for p in found.problems]
    if cuda and gpu_gib is not None and not found.problems:
        config = settled(config, job, shapes or spec_for(config), gpu_gib)
    data = DataCheck(not_checked="--shapes") if shapes else check_data(config, rows)
    placed = [place(problem, sources) for problem in data.problems]
    found.problems += failed(placed)
    found.warnings += [problem for problem in placed if not problem.failed]
    return found, data
