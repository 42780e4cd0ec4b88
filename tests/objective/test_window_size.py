"""The width of the window equals the authors' figures, token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctpo_megatron.objective import PolicyObjective, window_metrics

CTPO = PolicyObjective.preset("ctpo")


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=12),
    st.sampled_from([0.25, 0.5, 1.0]),
    st.sampled_from([0.0, 0.02]),
)
def test_the_figures_of_all_tokens(lengths: list[int], power: float, drift: float) -> None:
    objective = PolicyObjective.preset("ctpo", clip_power=power, clip_drift=drift)
    found = window_metrics(lengths, objective)
    if not any(lengths):
        assert found == {}
        return
    position = np.concatenate([np.arange(1, length + 1.0) for length in lengths])
    scale, moved = position**power, np.exp(-drift / 2 * position)
    figures = {"mean": scale.mean(), "min": scale.min(), "max": scale.max(), "p50": np.median(scale)}
    expected = {f"pg_update/la_scale/{name}": value for name, value in figures.items()}
    for name, bound in (("high", objective.clip_high), ("low", -objective.clip_low), ("c", objective.clip_c)):
        if bound is not None:
            expected[f"pg_update/la_clip_{name}_ratio/mean"] = (np.exp(bound * scale) * moved).mean()
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("objective", [None, PolicyObjective.preset("grpo"), PolicyObjective.preset("gspo")])
def test_another_window_has_no_width_by_position(objective: PolicyObjective | None) -> None:
    assert window_metrics([3, 4], objective) == {}
    assert window_metrics([], CTPO) == {}
