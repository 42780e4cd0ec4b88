"""Presets carry their published numbers; mistakes are refused by name."""

from __future__ import annotations

from typing import get_args

import pytest

from ctpo_megatron.config import AdvantageConfig, ConfigError, ObjectiveConfig, advantage_from_config
from ctpo_megatron.objective import PRESETS, PolicyObjective, objective_from_config


def test_presets_are_those_of_the_configuration():
    """`test_resolved_objective` has the numbers of each."""
    assert set(PRESETS) == set(get_args(ObjectiveConfig.model_fields["preset"].annotation))
    for name in PRESETS:
        assert PolicyObjective.preset(name) == objective_from_config(ObjectiveConfig(preset=name))


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("ctpo", {"clip_mode": "ratio"}, "clip_c = 0.05: .* must exceed 1;"),
        ("grpo", {"clip_low": 1.5}, "clip_low = 1.5: .* never negative"),
        ("grpo", {"clip_mode": "detached_ratio"}, "clip_c = 3.0: clip_mode: detached_ratio has no dual bound; set -1"),
        ("sapo", {"clip_c": 2.0}, "clip_c = 2.0: clip_mode: sigmoid has no dual bound; set -1"),
        ("dppo-tv", {"clip_c": 0.5}, "clip_c = 0.5: .* must exceed 1; 20 is usual"),
        ("grpo", {"clip_drift": 0.1}, "clip_drift = 0.1: with ratio of token: only the sum of"),
        ("ctpo-drift", {"ratio_mode": "geomean"}, "clip_drift = 0.0015: with log_power of geomean: only the sum"),
        ("cispo", {"clip_low": 10.0}, "clip_low = 10.0: with clip_mode: detached_ratio .* never negative"),
    ],
)
def test_contradictions_are_refused(name, overrides, message):
    with pytest.raises(ConfigError, match=message):
        PolicyObjective.preset(name, **overrides)


def test_all_contradictions_are_named_at_once():
    with pytest.raises(ConfigError, match="2 problems") as caught:
        PolicyObjective.preset("ctpo", clip_mode="ratio", clip_low=3.0)
    assert [problem.key for problem in caught.value.problems] == ["objective.clip_low", "objective.clip_c"]


def test_from_config():
    assert objective_from_config(ObjectiveConfig()) == PolicyObjective()
    config = ObjectiveConfig(
        preset="dapo", clip_high=0.3, clip_c=-1, loss_agg_mode="seq-mean-token-sum", count_masked_sequences=False
    )
    expected = PolicyObjective.preset(
        "dapo", clip_high=0.3, clip_c=None, loss_agg_mode="seq-mean-token-sum", count_masked_sequences=False
    )
    assert objective_from_config(config) == expected
    assert objective_from_config(ObjectiveConfig(loss_scale_factor=512.0)).loss_scale_factor == 512
    assert objective_from_config(ObjectiveConfig(clip_power=0.0)) == PolicyObjective.preset("ctpo-uniform")
    assert objective_from_config(ObjectiveConfig(clip_c=-1)) == PolicyObjective.preset("ctpo-paper")
    assert objective_from_config(ObjectiveConfig(preset="cppo", prefix_budget=0.02)).prefix_budget == 0.02
    by_quantile = ObjectiveConfig.model_validate({"preset": "cppo", "prefix_budget": {"quantile": 0.9, "min": 0.02}})
    assert objective_from_config(by_quantile) == PolicyObjective.preset("cppo-base")
    fixed = ObjectiveConfig(preset="cppo-base", prefix_budget=0.015)
    assert objective_from_config(fixed) == PolicyObjective.preset("cppo")


def test_a_key_that_the_clip_mode_has_no_use_for_is_refused():
    with pytest.raises(ConfigError, match="2 problems") as caught:
        objective_from_config(ObjectiveConfig(preset="grpo", tau_positive=2.0, prefix_budget=0.1))
    assert [problem.key for problem in caught.value.problems] == ["objective.tau_positive", "objective.prefix_budget"]
    assert "no effect with clip_mode: ratio; clip_mode: sigmoid uses it" in str(caught.value)
    assert objective_from_config(ObjectiveConfig(preset="sapo", tau_positive=2.0)).tau_positive == 2


def test_every_objective_key_of_the_configuration_is_a_field():
    others = {"preset", "anchor", "credit", "advantage", "correction", "function"}
    assert set(ObjectiveConfig.model_fields) - others <= set(PolicyObjective.__dataclass_fields__)


def test_dr_grpo_alone_does_not_divide_by_the_standard_deviation():
    assert [name for name in PRESETS if not advantage_from_config(ObjectiveConfig(preset=name)).normalize_std] == [
        "dr-grpo"
    ]
    for said in (True, False):
        config = ObjectiveConfig(preset="dr-grpo", advantage=AdvantageConfig(normalize_std=said))
        assert advantage_from_config(config).normalize_std is said
