"""The cells of the map: tasks, regimes and objectives, each with the settings that make it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ctpo_megatron.config import ObjectiveConfig, PolicyObjective, objective_from_config

STEPS, RECORDED_STEPS, EVAL_EVERY = 12, 10, 2
"""RL steps of a run; of a recording, and of a run that is trained on it; steps between its evaluations."""
SEEDS, TUNING_SEED = (0, 1, 2), 10
RATES = ("3e-4", "6e-4")
"""Of `policy.optimizer.lr`. Each objective gets one for each regime, by the tuning seed on the first task."""
FIRST = "ctpo"
"""The objective that the others are compared with."""


@dataclass(frozen=True)
class MapObjective:
    """One of six. ratio: what it is of. bound: whether it cuts the gradient or limits the weight."""

    name: str
    ratio: str
    bound: str
    fields: tuple[tuple[str, str | float], ...]

    @property
    def settings(self) -> list[str]:
        return [f"objective.{key}={value}" for key, value in self.fields]

    @property
    def numbers(self) -> PolicyObjective:
        """The objective with its preset's numbers, as a run has it."""
        return objective_from_config(ObjectiveConfig.model_validate(dict(self.fields)))


_PER_SEQUENCE = ("loss_agg_mode", "seq-mean-token-mean")
"""As `ctpo` has it, so that ratio and bound alone differ."""
_WEIGHT = (("preset", "cispo"), _PER_SEQUENCE)
OBJECTIVES = (
    MapObjective("ctpo", "prefix", "cuts", (("preset", "ctpo"),)),
    MapObjective("grpo", "token", "cuts", (("preset", "grpo"),)),
    MapObjective("sequence", "sequence", "cuts", (("preset", "sequence"),)),
    MapObjective("prefix-weight", "prefix", "weighs", (*_WEIGHT, ("ratio_mode", "cumprod"))),
    MapObjective("cispo", "token", "weighs", _WEIGHT),
    MapObjective("sequence-weight", "sequence", "weighs", (*_WEIGHT, ("ratio_mode", "sequence"))),
)


@dataclass(frozen=True)
class Regime:
    """How old the data is that a gradient is made of. passes, lag, frozen: what the laboratory does, too."""

    name: str
    words: str
    settings: tuple[str, ...] = ()
    passes: int = 1
    lag: int = 0
    frozen: bool = False

    @property
    def steps(self) -> int:
        return RECORDED_STEPS if self.frozen else STEPS


REGIMES = (
    Regime("on-policy", "one pass over each batch, 8 updates"),
    Regime("passes", "four passes over each batch, 32 updates", ("policy.passes_per_batch=4",), passes=4),
    Regime("lag", "batches sampled by the weights of 4 steps before, `behaviour`", ("rollout.lag=4",), lag=4),
    Regime(
        "frozen", "10 steps recorded from the start model, `behaviour`", ("objective.anchor=behaviour",), frozen=True
    ),
)


@dataclass(frozen=True)
class MapTask:
    """A task of examples/toolmath. options: of its program. files: configurations after the quickstart's."""

    name: str
    words: str
    source: str
    options: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


TASKS = (
    MapTask("toolmath", "the quickstart's task", "toolmath"),
    MapTask(
        "early-choice",
        "the first call decides which later answer is right, and the other route is worth .6",
        "early_choice",
        ("--early-choice",),
        ("examples/early_choice/early_choice.yaml",),
    ),
)


@dataclass(frozen=True)
class Cell:
    """One objective in one regime on one task."""

    task: MapTask
    regime: Regime
    objective: MapObjective

    @property
    def name(self) -> str:
        return f"{self.task.name}/{self.regime.name}/{self.objective.name}"

    @property
    def file(self) -> str:
        """Name of its result."""
        return f"{self.name.replace('/', '-')}.json"


def cells(parts: Sequence[str] = ()) -> Iterator[Cell]:
    """Yield the cells with one of `parts` in their names, all without parts. Raises ValueError for a part of none."""
    whole = [Cell(task, regime, objective) for task in TASKS for regime in REGIMES for objective in OBJECTIVES]
    for part in parts:
        if not any(_has(cell, part) for cell in whole):
            raise ValueError(f"no cell has {part!r} in its name TASK/REGIME/OBJECTIVE, such as {whole[0].name}")
    yield from (cell for cell in whole if not parts or any(_has(cell, part) for part in parts))


def _has(cell: Cell, part: str) -> bool:
    """Whether the names in `part`, between slashes, stand in the cell's name one after the other."""
    return f"/{part.strip('/')}/" in f"/{cell.name}/"
