"""Presets carry their published numbers; mistakes are refused by name."""

from __future__ import annotations

import pytest

from ctpo_megatron.config import ConfigError
from ctpo_megatron.config.schema import ObjectiveConfig
from ctpo_megatron.objective import PRESETS, PolicyObjective, objective_from_config

NUMBERS = {
    "ctpo": ("cumulative", "log_power", 0.025, 0.05, 0.05, 0.5, "sequence_mean"),
    "ctpo-fixed": ("cumulative", "log_power", 0.025, 0.05, 0.05, 0.0, "sequence_mean"),
    "ctpo-geomean": ("geomean", "log_power", 0.025, 0.05, 0.05, -0.5, "sequence_mean"),
    "grpo": ("token", "ratio", 0.2, 0.2, 3.0, 0.5, "sequence_mean"),
    "dapo": ("token", "ratio", 0.2, 0.28, 3.0, 0.5, "token_mean"),
    "gspo": ("sequence_geomean", "ratio", 3e-4, 4e-4, None, 0.5, "sequence_mean"),
    "sequence": ("sequence", "ratio", 0.2, 0.2, 3.0, 0.5, "sequence_mean"),
}


def test_numbers():
    assert set(NUMBERS) == set(PRESETS) == set(ObjectiveConfig.model_fields["preset"].annotation.__args__)
    for name, (ratio, clip, low, high, dual, power, aggregation) in NUMBERS.items():
        expected = PolicyObjective(ratio, clip, low, high, dual, power, aggregation, True)
        assert PolicyObjective.preset(name) == expected


def test_unknown_names_get_the_nearest():
    with pytest.raises(ConfigError, match="unknown 'ctp0'; did you mean 'ctpo'"):
        PolicyObjective.preset("ctp0")
    with pytest.raises(ConfigError, match="unknown 'clip_hi'; did you mean 'clip_high'"):
        PolicyObjective.preset("ctpo", clip_hi=1.0)
    with pytest.raises(ConfigError, match=r"objective\.ratio = .*unknown 'cumulativ'; did you mean 'cumulative'"):
        PolicyObjective.preset("ctpo", ratio="cumulativ")


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("ctpo", {"clip_low": -0.1}, "clip_low = -0.1: must not be negative"),
        ("ctpo", {"clip_high": float("nan")}, "objective.clip_high = .*: expected a finite number"),
        ("ctpo", {"clip_power": "half"}, "objective.clip_power = .*: expected a finite number"),
        ("ctpo", {"clip_low": None}, "objective.clip_low = .*: expected a finite number"),
        ("ctpo", {"clip": "ratio"}, "clip_dual = 0.05: .* must exceed 1;"),
        ("grpo", {"clip_low": 1.5}, "clip_low = 1.5: .* never negative"),
        ("ctpo", {"token_normalizer": 0.0}, "must be positive"),
    ],
)
def test_invalid_values_are_refused(name, overrides, message):
    with pytest.raises(ConfigError, match=message):
        PolicyObjective.preset(name, **overrides)


def test_all_invalid_values_are_named_at_once():
    with pytest.raises(ConfigError, match="2 problems") as caught:
        PolicyObjective.preset("ctpo", clip="ratio", clip_low=3.0)
    assert [problem.key for problem in caught.value.problems] == ["objective.clip_low", "objective.clip_dual"]


def test_from_config():
    assert objective_from_config(ObjectiveConfig()) == PolicyObjective()
    config = ObjectiveConfig(
        preset="dapo", clip_high=0.3, clip_dual=-1, aggregation="sequence_sum", count_masked_sequences=False
    )
    expected = PolicyObjective.preset(
        "dapo", clip_high=0.3, clip_dual=None, aggregation="sequence_sum", count_masked_sequences=False
    )
    assert objective_from_config(config) == expected
    assert objective_from_config(ObjectiveConfig(clip_power=0.0)) == PolicyObjective.preset("ctpo-fixed")


def test_every_objective_key_of_the_configuration_is_a_field():
    others = {"preset", "anchor", "advantage"}
    assert set(ObjectiveConfig.model_fields) - others <= set(PolicyObjective.__dataclass_fields__)
