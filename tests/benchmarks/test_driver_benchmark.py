"""The benchmark of rank zero's stages runs what a step runs."""

from __future__ import annotations

import pytest

from benchmarks.driver import GOALS, SAMPLES, SERIAL, figures, measure


@pytest.mark.slow
def test_every_stage_of_a_step_is_measured() -> None:
    found = measure(2)
    assert found["tokens"] > 2 * SAMPLES * 100
    assert set(SERIAL) < set(found["seconds"])
    assert all(seconds > 0 for seconds in found["seconds"].values())
    assert set(figures(found)) == set(GOALS)
