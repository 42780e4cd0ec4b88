"""`ctpo sweep --tune`: values of some keys for each point of a grid, picked on seeds that are compared with nothing.

A value is picked by the mean sampled reward over all steps, the mean of its tuning seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ctpo_megatron.cli.grid import FIXED, GridPoint, name_of, product, split_values
from ctpo_megatron.config import ConfigError, Problem

SEED = "run.seed"


@dataclass(frozen=True)
class Pick:
    """What was picked for a point. tried: values -> mean reward, in the order of the grid; `values` has the highest."""

    name: str
    point: GridPoint
    tried: tuple[tuple[GridPoint, float], ...]

    @property
    def values(self) -> GridPoint:
        return max(self.tried, key=lambda tried: tried[1])[0]

    def __str__(self) -> str:
        rewards = ", ".join(f"{_text(values)} {reward:.3f}" for values, reward in self.tried)
        return f"{f'{self.name}: ' if self.name else ''}{_text(self.values)} (mean reward: {rewards})"

    def record(self) -> dict[str, Any]:
        """Return it as `tuning.json` has it."""
        tried = [{"values": values, "mean_reward": reward} for values, reward in self.tried]
        return {"point": self.point, "values": self.values, "tried": tried}


@dataclass(frozen=True)
class Tuning:
    """A grid, and the keys that are tuned. grid: key -> values, without them. values: key -> values to try."""

    grid: Mapping[str, Sequence[str]]
    values: Mapping[str, Sequence[str]]
    seeds: Sequence[str]

    @property
    def points(self) -> list[GridPoint]:
        """The points of the grid without `run.seed`, each with values of its own; one point for a grid of seeds."""
        return [*product({key: values for key, values in self.grid.items() if key != SEED})]

    def tuning_runs(self) -> dict[str, GridPoint]:
        """Name -> keys of every run that tunes."""
        points = (point | values for point in self.points for values in product(self.values))
        return {self.name(each): each for point in points for each in self._with_seeds(point, self.seeds)}

    def compared_runs(self, picked: Callable[[GridPoint], GridPoint]) -> dict[str, GridPoint]:
        """Name -> keys of every run that is compared. picked: the tuned values of a point."""
        points = (point | picked(point) for point in self.points)
        seeds = self.grid.get(SEED, ())
        return {self.name(each): each for point in points for each in self._with_seeds(point, seeds)}

    def first_values(self, _point: GridPoint) -> GridPoint:
        """Return what stands for a value that is not picked yet."""
        return next(product(self.values))

    def pick(self, reward: Callable[[str], float]) -> list[Pick]:
        """Return the pick of each point. reward: the mean of a run by its name."""
        picks = []
        for point in self.points:
            tried = []
            for values in product(self.values):
                runs = self._with_seeds(point | values, self.seeds)
                tried.append((values, fmean(reward(self.name(run)) for run in runs)))
            picks.append(Pick(self.name(point), point, tuple(tried)))
        return picks

    def record(self, picks: Sequence[Pick]) -> dict[str, Any]:
        """Return what `tuning.json` has, which `ctpo compare` reads the keys of."""
        return {"keys": [*self.values], "seeds": [*self.seeds], "picks": {pick.name: pick.record() for pick in picks}}

    def name(self, point: GridPoint) -> str:
        """Return the name of a run, or of a point without a seed: the values that vary alone make it."""
        return name_of(point, among=[*self.grid, *self.values, SEED])

    def _with_seeds(self, point: GridPoint, seeds: Sequence[str]) -> Iterator[GridPoint]:
        yield from (point | {SEED: seed} for seed in seeds) if seeds else (point,)


def read_tuning(
    items: Sequence[str], seeds: str | None, grid: Mapping[str, Sequence[str]], common: Sequence[str]
) -> Tuning | None:
    """Return the tuning that the command line asks for; None: none.

    items: `a.b=c,d` of --tune. seeds: text of --tune-seeds. Raises ConfigError with every mistake.
    """
    if not items and seeds is None:
        return None
    values = {key: split_values(text) for key, _, text in (item.partition("=") for item in items)}
    chosen = split_values(seeds or "")
    problems = [*_problems(values, grid, common)]
    if len(values) < len(items):
        problems.append(Problem("", "a key is there twice", "give all its values at once", where="--tune"))
    if not items:
        problems.append(Problem("", "tunes nothing alone", "add --tune KEY=A,B, or leave it out", where="--tune-seeds"))
    elif chosen == [""]:
        problems.append(Problem("", "needs seeds of its own", "add, e.g., --tune-seeds 10,11", where="--tune"))
    elif "" in chosen or len(set(chosen)) < len(chosen):
        problems.append(Problem("", "has an empty seed, or one twice", "give each once", seeds, "--tune-seeds"))
    if problems:
        raise ConfigError(problems)
    return Tuning(grid, values, chosen)


def _problems(
    tuned: Mapping[str, Sequence[str]], grid: Mapping[str, Sequence[str]], common: Sequence[str]
) -> Iterator[Problem]:
    given = {text.partition("=")[0] for text in common}
    for key, values in tuned.items():
        if key == SEED or key in FIXED:
            yield Problem(key, "cannot be tuned", "leave it out", where="--tune")
        if key in grid or key in given:
            where = "in --grid" if key in grid else "an override"
            yield Problem(key, f"is {where}, too: which counts?", "give it once", where="--tune")
        if len(values) < 2 or len(set(values)) < len(values) or "" in values:
            fix = "give several, each once"
            yield Problem(key, "has one value, an empty one, or one twice", fix, ",".join(values), "--tune")


def refuse_shared_seeds(tuning: Iterable[int], compared: Iterable[int]) -> None:
    """Raise ConfigError where a seed tunes and is compared: the pick would be judged by what it was picked for."""
    if both := sorted({*tuning} & {*compared}):
        fix = "tune on other seeds"
        raise ConfigError([Problem("", "these seeds are compared, too", fix, ",".join(map(str, both)), "--tune-seeds")])


def at_the_end(picks: Sequence[Pick], tuning: Tuning) -> Iterator[Problem]:
    """Yield a warning for each number that was picked at an end of its values: a better one may lie beyond."""
    for pick in picks:
        for key, picked in pick.values.items():
            try:
                numbers = [float(value) for value in tuning.values[key]]
            except ValueError:
                continue
            if float(picked) in (min(numbers), max(numbers)):
                message = f"is at the end of {','.join(tuning.values[key])}: a better one may lie beyond"
                yield Problem(key, message, "add values there", float(picked), pick.name)


def mean_reward(run: Path) -> float:
    """Return the mean sampled reward over all steps of a finished run. Raises ConfigError where there is none."""
    from ctpo_megatron.report import RunData, mean_sampled_reward

    reward = mean_sampled_reward(RunData.load(run))
    if reward is None:
        message = "has no sampled reward that a value could be picked by"
        raise ConfigError([Problem("", message, "see its metrics.jsonl", str(run), "--tune")])
    return reward


def _text(values: GridPoint) -> str:
    return " ".join(f"{key}={value}" for key, value in values.items())
