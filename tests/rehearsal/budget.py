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
            most = limit(phase, owner, micro_batches, case.dtype)
            if ours and case.layout.get("router_replay") and "ours with replay" in BUDGET[phase]:
                most += limit(phase, "ours with replay", micro_batches, case.dtype)
            if found.total() > most:
                problems.append(f"{phase}, {owner}: {found.total()} for {micro_batches} micro-batches, at most {most}:")
                problems += [f"  {n} {s.what} at {s.where}" for s, n in found.most_common()]
    return problems


def limit(phase: str, owner: str, micro_batches: Sequence[int], dtype: str = "float32") -> int:
    """Of calls of a phase with so many micro-batches each."""
    line = BUDGET[phase][owner]
    call = int(line["call"]) + (int(line.get("float16", 0)) if dtype == "float16" else 0)
    return int(line["micro_batch"]) * sum(micro_batches) + call * len(micro_batches)
