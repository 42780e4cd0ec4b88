"""The diagnosis of a stalled run: which rank keeps the others waiting, and where each of them is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ctpo_megatron.run.stacks import Place


def describe(places: Mapping[int, Place], names: Sequence[str]) -> str:
    """First the ranks that are not waiting, then the others; ranks at the same place share a line.

    places: of the ranks that answered. names: of all ranks, e.g. `rank 1 (process 77 on host)`.
    """
    ranks = range(len(names))
    silent = [rank for rank in ranks if rank not in places]
    waiting = [rank for rank in ranks if rank in places and places[rank].waits]
    awaited = [rank for rank in ranks if rank not in waiting]
    lines = [_verdict(awaited, waiting, names)]
    if silent:
        lines.append(f"{_joined(silent, names)}: no answer; stopped, gone, or in C code that keeps Python's lock")
    texts: dict[str, list[int]] = {}
    for rank in sorted(places, key=lambda rank: (places[rank].waits, rank)):
        texts.setdefault(str(places[rank]), []).append(rank)
    return "\n  ".join([*lines, *(f"{_joined(group, names)}: {text}" for text, group in texts.items())])


def _verdict(awaited: Sequence[int], waiting: Sequence[int], names: Sequence[str]) -> str:
    if not awaited:
        return "every rank waits for others: their collectives differ, or the network between them is gone"
    if not waiting:
        return f"{_joined(awaited, names)} {'does' if len(awaited) == 1 else 'do'} not go on"
    return f"{_joined(waiting, names)} {'waits' if len(waiting) == 1 else 'wait'} for {_joined(awaited, names)}"


def _joined(ranks: Sequence[int], names: Sequence[str]) -> str:
    """`rank 1 (process 77 on host)`, or `ranks 0, 2-7`."""
    if len(ranks) == 1:
        return names[ranks[0]]
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return f"ranks {', '.join(str(r[0]) if len(r) == 1 else f'{r[0]}-{r[-1]}' for r in runs)}"
