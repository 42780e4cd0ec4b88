"""What a run records of its objective: a line for every preset, and the window that token diagnostics draw."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import Any

import pytest
import torch

from ctpo_megatron.config import (
    CorrectionConfig,
    ObjectiveConfig,
    advantage_from_config,
    resolved_objective,
)
from ctpo_megatron.config.extension import Extension
from ctpo_megatron.objective import (
    PRESETS,
    Denominators,
    PolicyObjective,
    group_advantages,
    objective_from_config,
    policy_loss,
    token_diagnostics,
)

LINES = {
    "ctpo": "cumulative ratio, window (-0.025, +0.05) sqrt(t), dual 0.05, mean per sequence",
    "ctpo-paper": "cumulative ratio, window (-0.025, +0.05) sqrt(t), no dual bound, mean per sequence",
    "ctpo-uniform": "cumulative ratio, window (-0.025, +0.05), dual 0.05, mean per sequence",
    "ctpo-fixed": "cumulative ratio, window (0.5, 5) of r, no dual bound, mean per sequence",
    "ctpo-drift": "cumulative ratio, window (-0.025, +0.05) sqrt(t) - 0.00075 t, dual 0.05, mean per sequence",
    "ctpo-geomean": "geometric mean ratio of the prefix, window (-0.025, +0.05) t^-0.5, dual 0.05, mean per sequence",
    "ctpo-weight": "cumulative ratio, window (0, 5) of r without its gradient, mean per sequence",
    "grpo": "token ratio, window (0.8, 1.2) of r, dual 3, mean per sequence",
    "dr-grpo": "token ratio, window (0.8, 1.2) of r, no dual bound, sum per sequence / 1, advantages not divided by "
    "their standard deviation",
    "dapo": "token ratio, window (0.8, 1.28) of r, dual 3, mean over tokens",
    "grpo-trl": "token ratio, window (0.8, 1.2) of r, no dual bound, mean per sequence, advantages over std + 0.0001",
    "dapo-trl": "token ratio, window (0.8, 1.2) of r, no dual bound, mean over tokens, advantages over std + 0.0001",
    "dr-grpo-trl": "token ratio, window (0.8, 1.2) of r, no dual bound, sum per sequence / 1, advantages over std + "
    "0.0001",
    "grpo-verl": "token ratio, window (0.8, 1.2) of r, dual 3, mean over tokens",
    "gspo": "geometric mean ratio of the sequence, window (0.9997, 1.0004) of r, no dual bound, mean per sequence",
    "cispo": "token ratio, window (0, 5) of r without its gradient, mean over tokens",
    "sapo": "token ratio, sigmoid of r, tau 1 (A > 0), 1.05 (A < 0), mean per sequence",
    "gmpo": "geometric mean ratio of the sequence, window (-0.4, +0.4) of each token's log-ratio, mean per sequence",
    "dppo-tv": "token ratio, total variation of a token at most 0.15, r at most 20, mean over tokens",
    "dppo-kl": "token ratio, KL of a token at most 0.05, r at most 20, mean over tokens",
    "cppo": "token ratio, total variation of a token at most 0.15, 0.015 a token over the prefix, weights 1 to 0.8, "
    "mean over tokens",
    "cppo-base": "token ratio, total variation of a token at most 0.15, the sequence's 0.9 quantile (at least 0.02) a "
    "token over the prefix, weights 1 to 0.8, mean over tokens",
    "trm-k3": "token ratio, mean k3 of a sequence at most 0.002, largest at most 0.1, mean over tokens",
    "sequence": "sequence ratio, window (0.8, 1.2) of r, dual 3, mean per sequence",
}

CORRECTED = {"level": "sequence", "cap": 2.0, "reject": ({"stat": "k1", "over": "token", "low": -1.6, "high": 0.7},)}
CHANGED = [
    ({"clip_high": 0.1, "clip_c": -1}, "window (-0.025, +0.1) sqrt(t), no dual bound, mean per sequence"),
    ({"clip_power": 1.0}, "window (-0.025, +0.05) t, dual 0.05, mean per sequence"),
    ({"clip_low": 0.0}, "window (+0, +0.05) sqrt(t), dual 0.05, mean per sequence"),
    (
        {"preset": "dr-grpo", "loss_scale_factor": 8000.0, "advantage": {"normalize_std": True}},
        "sum per sequence / 8000",
    ),
    ({"count_masked_sequences": False}, "mean per sequence, masked sequences not counted"),
    ({"entropy_coef": 0.001}, "mean per sequence, entropy bonus 0.001"),
    ({"anchor": "behaviour"}, "mean per sequence, behaviour anchor"),
    ({"preset": "grpo-verl", "advantage": {"epsilon": 0.01}}, "mean over tokens, advantages over std + 0.01"),
    ({"preset": "grpo-trl", "advantage": {"epsilon": 1e-6}}, "no dual bound, mean per sequence"),
    ({"advantage": {"kind": "rloo"}}, "mean per sequence, rloo advantages"),
    ({"credit": "turn"}, "mean per sequence, credit by turn"),
    (
        {"anchor": "decoupled", "correction": CORRECTED},
        "decoupled anchor, sequence weights up to 2, rejects token outside k1 (-1.6, 0.7)",
    ),
    ({"correction": {"veto": 1e-4}}, "mean per sequence, veto below 0.0001"),
    ({"preset": "dppo-tv", "clip_low": 0.2, "clip_c": -1}, "at most 0.2 (A < 0), 0.15 (A > 0), mean over tokens"),
]


def test_the_line_of_every_preset() -> None:
    assert LINES.keys() == PRESETS.keys()
    for name, words in LINES.items():
        assert resolved_objective(ObjectiveConfig(preset=name))["summary"] == f"Objective: {name}: {words}"


@pytest.mark.parametrize(("given", "end"), CHANGED, ids=lambda value: str(value)[:40])
def test_the_line_names_what_is_changed(given: dict[str, Any], end: str) -> None:
    assert resolved_objective(ObjectiveConfig(**given))["summary"].endswith(end)


def test_turns_that_end_later_are_named() -> None:
    resolved = resolved_objective(ObjectiveConfig(credit="turn", turn_ratio="turn-end"))
    assert resolved["summary"].startswith("Objective: ctpo: cumulative ratio to the end of a turn, window (-0.025")
    assert resolved["turn_ratio"] == "turn-end"


def test_an_objective_of_the_users_own_has_no_window_of_ours() -> None:
    config = ObjectiveConfig(preset="dapo", function=Extension(name="soft:Clip", arguments={"width": 0.2}))
    resolved = resolved_objective(config)
    assert resolved["summary"] == "Objective: soft:Clip: mean over tokens"
    assert (resolved["ratio_mode"], resolved["window"], resolved["dual"]) == (None, None, None)


def test_rejection_and_cap_are_recorded() -> None:
    rule = {"stat": "k3", "over": "sequence_mean", "low": None, "high": 0.1}
    correction = {"level": "token", "cap": 3.0, "normalize": True, "reject": [rule], "veto": None}
    resolved = resolved_objective(ObjectiveConfig(anchor="decoupled", correction=CorrectionConfig(**correction)))
    assert (resolved["anchor"], resolved["correction"]) == ("decoupled", correction)
    end = "token weights up to 3, normalized, rejects sequence_mean outside k3 (-inf, 0.1)"
    assert resolved["summary"].endswith(end)


@pytest.mark.parametrize("name", PRESETS)
def test_it_is_plain_data(name: str) -> None:
    resolved = resolved_objective(ObjectiveConfig(preset=name))
    assert json.loads(json.dumps(resolved, allow_nan=False)) == resolved


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; from ctpo_megatron.config import ObjectiveConfig, resolved_objective\n"
        "resolved_objective(ObjectiveConfig()); sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def bounds(resolved: dict[str, Any], t: int) -> tuple[float, float]:
    """Low and high bound of log r_t as the record has them."""
    window = resolved["window"]
    if resolved["clip_mode"] == "log_power":
        low, high = (window[name] * t ** window["power"] + window["drift"] * t for name in ("low", "high"))
        return low, high
    return math.log(window["low"]) if window["low"] else -math.inf, math.log(window["high"])


def of_mode(*modes: str) -> list[str]:
    return [name for name in PRESETS if resolved_objective(ObjectiveConfig(preset=name))["clip_mode"] in modes]


@pytest.mark.parametrize("t", [1, 100])
@pytest.mark.parametrize("name", of_mode("log_power", "ratio", "detached_ratio"))
def test_the_window_is_that_of_the_diagnostics(name: str, t: int) -> None:
    config = ObjectiveConfig(preset=name)
    zeros, sequence = torch.zeros(t, dtype=torch.float64), torch.tensor([0, t])
    objective = objective_from_config(config)
    measured = token_diagnostics(zeros, zeros, torch.ones(t), objective, cu_seqlens=sequence)
    expected = pytest.approx(bounds(resolved_objective(config), t), rel=1e-5, abs=2e-7)  # float32 next to 1
    assert (measured.low[-1].item(), measured.high[-1].item()) == expected


@pytest.mark.parametrize("name", PRESETS)
def test_the_aggregation_is_that_of_the_loss(name: str) -> None:
    """A sequence of one token, one of three, and one without any loss token."""
    resolved, objective = resolved_objective(ObjectiveConfig(preset=name)), PolicyObjective.preset(name)
    zeros, of_sequence = torch.zeros(6, dtype=torch.float64), torch.tensor([0, 1, 4, 6])
    mask = torch.tensor([1, 1, 1, 1, 0, 0])
    advantages = torch.tensor([1.0, -1.0, 1.0])
    measured = policy_loss(zeros, zeros, advantages, torch.ones(6), objective, loss_mask=mask, cu_seqlens=of_sequence)
    token = measured.per_token
    one, three = token[0].item(), token[1:4].sum().item()
    sequences = Denominators.of(mask, of_sequence).sequences if resolved["count_masked_sequences"] else 2
    expected = {
        "seq-mean-token-mean": (one + three / 3) / sequences,
        "seq-mean-token-sum": (one + three) / sequences / (resolved["loss_scale_factor"] or 1),
        "token-mean": (one + three) / 4,
    }[resolved["loss_agg_mode"]]
    assert measured.loss.item() == pytest.approx(expected)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("kind", ["group", "rloo", "mean_baseline"])
def test_whether_advantages_are_divided(name: str, kind: str) -> None:
    config = ObjectiveConfig(preset=name, advantage={"kind": kind})
    recorded = resolved_objective(config)["advantage"]
    twice = [group_advantages([0.0, scale], advantage_from_config(config))[1] for scale in (1.0, 2.0)]
    assert (twice[1] == pytest.approx(twice[0], rel=1e-4)) is recorded["normalize_std"]
