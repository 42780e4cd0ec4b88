"""The budget of synchronizations, `synchronizations.toml`, and what exceeds it."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.rehearsal.cases import Case
from tests.rehearsal.synchronizations import Synchronization

BUDGET = tomllib.loads((Path(__file__).parent / "synchronizations.toml").read_text(encoding="utf-8"))


def over_budget(counts: Mapping[Synchronization, int], passes: Mapping[str, Sequence[int]], case: Case) -> list[str]:
    """Every line of the budget that is exceeded, and below it where. passes: see `cases.Report`."""
    problems = []
    for phase, micro_batches in passes.items():
        for owner, ours in ((f"ours {case.head}", True), (f"megatron {case.family}", False)):
            found = Counter({s: n for s, n in counts.items() if s.phase == phase and s.ours == ours})
            most = limit(phase, owner, micro_batches)
            if ours and case.layout.get("router_replay") and "ours with replay" in BUDGET[phase]:
                most += limit(phase, "ours with replay", micro_batches)
            if found.total() > most:
                problems.append(f"{phase}, {owner}: {found.total()} for {micro_batches} micro-batches, at most {most}:")
                problems += [f"  {n} {s.what} at {s.where}" for s, n in found.most_common()]
    return problems


def limit(phase: str, owner: str, micro_batches: Sequence[int]) -> int:
    """Of calls of a phase with so many micro-batches each."""
    line = BUDGET[phase][owner]
    return int(line["micro_batch"]) * sum(micro_batches) + int(line["call"]) * len(micro_batches)
