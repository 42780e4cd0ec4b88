"""How many CPU threads a rank takes."""

from __future__ import annotations

import os

import pytest

from ctpo_megatron.policy.parallel import usable_threads


@pytest.mark.parametrize(("wanted", "ranks", "taken"), [(2, None, 2), (3, 2, 3), (8, 2, 4), (4, 8, 1), (1, 16, 1)])
def test_ranks_of_a_node_do_not_take_more_threads_than_it_has_cores(
    monkeypatch: pytest.MonkeyPatch, wanted: int, ranks: int | None, taken: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert usable_threads(wanted) == taken
