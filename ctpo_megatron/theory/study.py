"""The whole study: every table from one seed, and its files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ctpo_megatron.base.files import write_json
from ctpo_megatron.theory.random_walk import clip_tables, correlated_table, simulated, spread_table
from ctpo_megatron.theory.tables import (
    Counterexample,
    TheoryTable,
    bias_tables,
    counterexample_table,
    equal_table,
    independent_table,
    outcome_table,
    variance_table,
)
from ctpo_megatron.theory.tree import Tree, log_softmax
from ctpo_megatron.theory.turns import turn_tables

MOST_SEQUENCES, MOST_SAMPLES, LEAST_SAMPLES = 10_000, 200_000, 100
LIMITS = {"shift": (1e-6, 5.0), "sigma": (1e-6, 1.0)}
"""Beyond, ratios leave the range of float64, or differ from 1 by its rounding."""


@dataclass(frozen=True)
class StudySettings:
    """vocabulary, horizon: V and H of the trees. shift: of the target's logits, times N(0, 1). samples: sequences and
    walks of each simulation. sigma: standard deviation of a token's log-ratio, nats; figure 1 of the paper has .0387 at
    step 100.
    """

    seed: int = 0
    vocabulary: int = 3
    horizon: int = 4
    shift: float = 0.7
    sigma: float = 0.0387
    samples: int = 20_000

    def problems(self) -> Iterator[str]:
        """What cannot be computed, with the remedy."""
        if self.seed < 0:
            yield f"--seed {self.seed}: give 0 or more"
        size = (self.vocabulary, self.horizon)
        if min(size) < 2:
            yield f"--vocabulary {size[0]} --horizon {size[1]}: give at least 2 of each"
        elif max(size) > MOST_SEQUENCES or self.vocabulary**self.horizon > MOST_SEQUENCES:
            yield f"--vocabulary {size[0]} --horizon {size[1]}: at most {MOST_SEQUENCES:,} sequences, V^H; give less"
        for name, (least, most) in LIMITS.items():
            if not least <= (value := getattr(self, name)) <= most:  # also NaN
                yield f"--{name} {value:g}: give {least:g} to {most:g}"
        if not LEAST_SAMPLES <= self.samples <= MOST_SAMPLES:
            yield f"--samples {self.samples}: give {LEAST_SAMPLES} to {MOST_SAMPLES:,}"


@dataclass(frozen=True)
class Study:
    """tables: in the order in which they are read. curves: clip rates at all positions of the figure."""

    settings: StudySettings
    tables: tuple[TheoryTable, ...]
    curves: TheoryTable

    def table(self, name: str) -> TheoryTable:
        """By name. Raises KeyError."""
        return {table.name: table for table in (*self.tables, self.curves)}[name]


def study(settings: StudySettings) -> Study:
    """Compute every table. Raises ValueError for settings that have problems."""
    if problems := list(settings.problems()):
        raise ValueError("; ".join(problems))
    trees, samples, walks, increments, turns = np.random.default_rng(settings.seed).spawn(5)
    tree = Tree.random(trees, settings.vocabulary, settings.horizon, settings.shift)
    logits = trees.standard_normal((settings.horizon, settings.vocabulary))
    moved = logits + settings.shift * trees.standard_normal(logits.shape)
    independent = Tree.independent(log_softmax(logits), log_softmax(moved))
    walk = simulated(walks, settings.samples, settings.sigma)
    shown, curves = clip_tables(walk, walks.random(settings.samples) < 0.5, settings.sigma)
    tables = (
        *bias_tables(tree, trees),
        outcome_table(tree, trees, settings.shift),
        *turn_tables(turns, settings.vocabulary, settings.horizon, settings.shift),
        variance_table(tree),
        independent_table(independent, samples, settings.samples),
        equal_table(settings.vocabulary, settings.horizon),
        counterexample_table(Counterexample()),
        spread_table(walk, settings.sigma),
        shown,
        correlated_table(increments, settings.samples, settings.sigma),
    )
    return Study(settings, tables, curves)


TABLES, FIGURES = "theory.json", "figures"


def write_study(found: Study, folder: Path) -> list[Path]:
    """Write theory.json and the figures into an existing folder, replacing earlier ones; returns what was written.

    Raises OSError.
    """
    from ctpo_megatron.report import save_charts
    from ctpo_megatron.theory.figures import charts

    return [write_json(folder / TABLES, content(found)), *save_charts(charts(found), folder / FIGURES)]


def content(found: Study) -> dict[str, Any]:
    """Plain JSON: `settings`; `tables`, name -> title, says, columns and rows; the curves are one of them."""
    tables = {table.name: asdict(table) for table in (*found.tables, found.curves)}
    return {"settings": asdict(found.settings), "tables": tables}
