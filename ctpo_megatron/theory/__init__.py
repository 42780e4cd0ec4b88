"""theory: what the CTPO paper proves and assumes, by exact enumeration and by simulation. float64, numpy alone.

- `Tree`: every sequence of a small random tree under two policies; bias of the gradient of each ratio (proposition 1).
- `variances`, `independent_variances`, `sampled_variances`: variance of the ratios (proposition 2).
- `TwoTurns`: rewards of turns, which ratio and which baseline leave the gradient unbiased.
- `Counterexample`: why an outcome reward leaves the prefix ratio biased.
- `clip_rate`, `normal_walks`, `TokenPairs`, `CorrelatedWalk`: log r_t as a random walk, and what a window cuts.
- `study`: all of it as `TheoryTable`s from one seed, which `ctpo theory` prints; `write_study` writes them.
"""

from ctpo_megatron.theory.correlated_walk import Autoregressive, CorrelatedWalk, UnequalTrajectories
from ctpo_megatron.theory.counterexample import Counterexample
from ctpo_megatron.theory.files import write_study
from ctpo_megatron.theory.random_walk import (
    TokenPairs,
    Window,
    clip_rate,
    clipped_share,
    drift,
    normal_walks,
    windows,
)
from ctpo_megatron.theory.study import Study, StudySettings, study
from ctpo_megatron.theory.tables import TheoryTable
from ctpo_megatron.theory.tree import RATIOS, Paths, Tree, log_softmax, relative_bias
from ctpo_megatron.theory.turns import TwoTurns
from ctpo_megatron.theory.variance import (
    chi_squared,
    equal_factors,
    independent_variances,
    sampled_variances,
    second_moments,
    suffix_share,
    variances,
)

__all__ = [
    "RATIOS",
    "Autoregressive",
    "CorrelatedWalk",
    "Counterexample",
    "Paths",
    "Study",
    "StudySettings",
    "TheoryTable",
    "TokenPairs",
    "Tree",
    "TwoTurns",
    "UnequalTrajectories",
    "Window",
    "chi_squared",
    "clip_rate",
    "clipped_share",
    "drift",
    "equal_factors",
    "independent_variances",
    "log_softmax",
    "normal_walks",
    "relative_bias",
    "sampled_variances",
    "second_moments",
    "study",
    "suffix_share",
    "variances",
    "windows",
    "write_study",
]
