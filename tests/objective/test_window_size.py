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
    expected = {
        "pg_update/la_scale/mean": scale.mean(),
        "pg_update/la_scale/min": scale.min(),
        "pg_update/la_scale/max": scale.max(),
        "pg_update/la_scale/p50": np.median(scale),
        "pg_update/la_clip_high_ratio/mean": (np.exp(objective.clip_high * scale) * moved).mean(),
        "pg_update/la_clip_low_ratio/mean": (np.exp(-objective.clip_low * scale) * moved).mean(),
    }
    if objective.clip_c is not None:
        expected["pg_update/la_clip_c_ratio/mean"] = (np.exp(objective.clip_c * scale) * moved).mean()
    assert found == pytest.approx(expected)


@pytest.mark.parametrize("objective", [None, PolicyObjective.preset("grpo"), PolicyObjective.preset("gspo")])
def test_another_window_has_no_width_by_position(objective: PolicyObjective | None) -> None:
    assert window_metrics([3, 4], objective) == {}
    assert window_metrics([], CTPO) == {}
