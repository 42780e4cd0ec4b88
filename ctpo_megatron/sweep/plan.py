"""The runs of a sweep and the SFT that they start from, each as overrides for `ctpo train`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ctpo_megatron.config import Config, ConfigError, Problem, Sources, load_with_sources
from ctpo_megatron.sweep.grid import SEED, Grid

SftMode = Literal["once", "each"]
"""One SFT for all runs, or one for each seed."""
_SHAPES_SFT = ("sft", "model", "prepare", "data.system_prompt", "data.tool_in_prompt", "rollout.tool_parser")
"""Keys, or sections, of which every value has an SFT and a task of its own."""
_SFT_ALONE = {
    "run.steps": 0,
    "data.eval": [],
    "eval.every": 0,
    "eval.prompts": None,
    "checkpoint.every": 0,
    "checkpoint.keep_best": 0,
    "export.enabled": False,
    "sft.export": True,
}
"""What a run that does SFT for others sets: what follows SFT is left to them."""
_SHARED = "shared"
_SHOWN = 3


@dataclass(frozen=True)
class PlannedRun:
    """One run. values: of the axes. overrides: for `ctpo train`. sft: the run whose SFT model it starts from.

    config: as it will be, but that it does SFT itself: what `sft.from` names is there only when that has been done.
    """

    name: str
    values: dict[str, str]
    overrides: tuple[str, ...]
    config: Config
    sources: Sources
    sft: str | None = None

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self.config.run.directory

    @property
    def shown(self) -> str:
        """What differs from the other runs."""
        return ", ".join(f"{key}={value}" for key, value in self.values.items())


@dataclass(frozen=True)
class Sweep:
    """All runs, in order. sfts: the runs that do SFT for them, by name. mode: None where there is none to share."""

    directory: Path
    grid: Grid
    mode: SftMode | None
    sfts: dict[str, PlannedRun]
    runs: tuple[PlannedRun, ...]

    @property
    def all(self) -> Iterator[PlannedRun]:
        """Every SFT, then every run."""
        yield from self.sfts.values()
        yield from self.runs


def plan(path: str, grid: Grid, mode: SftMode) -> Sweep:
    """The sweep of a configuration file.

    Raises ConfigError with what is wrong with any of the configurations, each mistake once.
    """
    return _Planner(path, grid, mode).plan()


class _Planner:
    def __init__(self, path: str, grid: Grid, mode: SftMode) -> None:
        self._path, self._grid, self._mode = path, grid, mode
        self._points = list(grid.points())
        self._mistakes = Mistakes(len(self._points))

    def plan(self) -> Sweep:
        base = self._load("", self._shaping(self._points[0]))
        if base is None:  # what is wrong is not for every run to repeat, but other values may have mistakes, too
            for point in self._points:
                self._load(self._grid.name(point), point)
            self._mistakes.raise_any()
            raise AssertionError("a configuration that cannot be loaded has mistakes")
        self._mistakes.add("", _refused(base[0], self._mode))
        directory = base[0].run.directory
        shares = base[0].own_sft is not None and base[0].checkpoint.load is None
        sfts: dict[str, PlannedRun] = {}
        runs = []
        for point in self._points:
            group = self._shaping(point)
            name = "-".join(["sft" if shares else _SHARED, *([self._name(group)] if group else [])])
            if name not in sfts and (sft := self._sft(name, group, directory, alone=shares)) is not None:
                sfts[name] = sft
            if name in sfts and (run := self._run(point, directory, sfts[name], shares)) is not None:
                runs.append(run)
        self._mistakes.add("", _twins(runs))
        self._mistakes.raise_any()
        return Sweep(directory, self._grid, self._mode if shares else None, sfts if shares else {}, tuple(runs))

    def _shaping(self, point: dict[str, str]) -> dict[str, str]:
        """The values that decide which SFT and which task a run has."""
        return {key: value for key, value in point.items() if _shapes_sft(key) or (key, self._mode) == (SEED, "each")}

    def _name(self, group: dict[str, str]) -> str:
        return replace(self._grid, axes=tuple(a for a in self._grid.axes if a.key in group)).name(group)

    def _sft(self, name: str, group: dict[str, str], directory: Path, *, alone: bool) -> PlannedRun | None:
        """The run that prepares the task and does SFT; alone: what follows SFT is left out."""
        settings = {"run.root": str(directory), "run.name": name, **(_SFT_ALONE if alone else {})}
        return self._planned(name, group, group, settings)

    def _run(self, point: dict[str, str], directory: Path, sft: PlannedRun, shares: bool) -> PlannedRun | None:
        name = self._grid.name(point)
        settings: dict[str, Any] = {"run.root": str(directory), "run.name": name}
        if (task := sft.config.prepare) is not None:
            settings |= {"prepare.directory": task.directory, "prepare.seed": task.seed}
        run = self._planned(name, point, point, settings)
        if run is None or not shares:
            return run
        source = _override("sft.from", str(sft.directory))
        return replace(run, overrides=(*run.overrides, source), sft=sft.name)

    def _planned(
        self, name: str, values: dict[str, str], point: dict[str, str], settings: dict[str, Any]
    ) -> PlannedRun | None:
        ours = [_override(key, value) for key, value in {**settings, "run.resume": "auto"}.items()]
        if (loaded := self._load(name, point, ours)) is None:
            return None
        overrides = (*self._overrides(point), *ours)
        return PlannedRun(name, values, overrides, *loaded)

    def _overrides(self, point: dict[str, str]) -> list[str]:
        return [*self._grid.overrides, *(f"{key}={value}" for key, value in point.items())]

    def _load(self, name: str, point: dict[str, str], ours: Sequence[str] = ()) -> tuple[Config, Sources] | None:
        try:
            return load_with_sources(self._path, [*self._overrides(point), *ours])
        except ConfigError as error:
            self._mistakes.add(name, error.problems)
            return None


class Mistakes:
    """Problems of several configurations, each once, with the runs that have it where not all have it."""

    def __init__(self, runs: int) -> None:
        self._runs = runs
        self._found: dict[str, tuple[Problem, dict[str, None]]] = {}

    def add(self, name: str, problems: Sequence[Problem]) -> None:
        """What is wrong with a run. name: empty for what is wrong with the sweep."""
        for problem in problems:
            self._found.setdefault(str(problem), (problem, {}))[1].update({name: None} if name else {})

    def problems(self) -> list[Problem]:
        """All of them, in the order found."""
        return [self._of_runs(problem, list(names)) for problem, names in self._found.values()]

    def raise_any(self) -> None:
        """Raise ConfigError if there are any."""
        if self._found:
            raise ConfigError(self.problems())

    def _of_runs(self, problem: Problem, names: Sequence[str]) -> Problem:
        if not names or len(names) >= self._runs:
            return problem
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        return replace(problem, message=f"{problem.message} [{', '.join(names[:_SHOWN])}{more}]")


def _shapes_sft(key: str) -> bool:
    return any(key == part or key.startswith(f"{part}.") for part in _SHAPES_SFT)


def _refused(base: Config, mode: SftMode) -> list[Problem]:
    """What a sweep cannot do for a configuration."""
    problems = []
    if base.run.overwrite:
        message = "would delete each run as it is continued"
        problems.append(Problem("run.overwrite", message, "choose another run.name, or delete the folder", True))
    if mode == "each" and base.own_sft is None:
        why = "sft.from takes it from another run" if base.sft else "sft: null"
        problems.append(Problem("--sft", f"there is no SFT to do for each seed ({why})", "leave it out", mode))
    return problems


def _twins(runs: Sequence[PlannedRun]) -> list[Problem]:
    """Runs whose values make no difference, or which have one name."""
    problems, before, names = [], dict[str, PlannedRun](), set[str]()
    for run in runs:
        tree = run.config.model_dump(mode="json")
        tree["run"]["name"] = ""
        same = before.setdefault(json.dumps(tree, sort_keys=True), run)
        if same is not run:
            message = f"{same.shown} and {run.shown} are the same configuration"
            problems.append(Problem("--grid", message, "give every value once"))
        elif run.name in names:
            message = f"two runs would be named {run.name}: {run.shown} is the second"
            problems.append(Problem("--grid", message, "sweep over them one after the other"))
        names.add(run.name)
    return problems


def _override(key: str, value: Any) -> str:
    return f"{key}={json.dumps(value)}"
