"""The whole study: every table from one seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from theory_tables import (
    Counterexample,
    TheoryTable,
    bias_tables,
    counterexample_table,
    equal_table,
    independent_table,
    outcome_table,
    variance_table,
)
from theory_tree import Tree, log_softmax
from theory_turns import turn_tables
from theory_walk import clip_tables, correlated_table, simulated, spread_table


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
    """Compute every table."""
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
