"""theory: what the CTPO paper proves and assumes, by exact enumeration and by simulation. float64, numpy alone.

`study` makes all of it as `TheoryTable`s from one seed, which `ctpo theory` prints; `write_study` writes them.

- tree: every sequence of a small random tree under two policies; bias and variance of each ratio (propositions 1, 2).
- tables: what enumeration says; why an outcome reward leaves the prefix ratio biased (`Counterexample`).
- turns: rewards of turns, which ratio and which baseline leave the gradient unbiased.
- random_walk: log r_t as a random walk, and what a window cuts.
"""

from ctpo_megatron.theory.study import StudySettings, study, write_study

__all__ = ["StudySettings", "study", "write_study"]
