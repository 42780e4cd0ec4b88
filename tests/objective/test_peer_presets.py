"""Presets named after a job of TRL or verl, against the formulas of these trainers written out here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from ctpo_megatron.config import (
    ObjectiveConfig,
    advantage_from_config,
    flattened,
    load_config,
    resolved_objective,
)
from ctpo_megatron.objective import batch_advantages, objective_from_config, policy_loss

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 40
NAMESAKE = {"grpo-trl": "grpo", "dapo-trl": "dapo", "dr-grpo-trl": "dr-grpo", "grpo-verl": "grpo"}
REWARDS = [[0.0, 1.0, 0.0, 1.0], [0.5, 0.51, 0.49, 0.52], [1.0, 1.0, 1.0, 1.0]]
"""A usual group, one whose deviation a number next to it changes by more than a percent, and one without a signal."""
LENGTHS = [3, 25, 40, 11, 7, 40, 1, 18, 5, 9, 30, 2]


def configured(preset: str, *overrides: str) -> ObjectiveConfig:
    """The objective of a job with these responses at most."""
    given = [f"objective.preset={preset}", f"rollout.max_response_tokens={LONGEST}", *overrides]
    return load_config(ROOT / "configs" / "no_tools.yaml", given).objective


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, those before the update, and what counts: a tool's output does not, nor a whole truncated response."""
    random = torch.Generator().manual_seed(8)
    shape = (len(LENGTHS), LONGEST)
    before = -3 * torch.rand(shape, generator=random, dtype=torch.float64)
    moved = 0.8 * torch.randn(shape, generator=random, dtype=torch.float64)
    mask = (torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]).double()
    mask[1, 4:9] = 0
    mask[5] = 0
    return before + moved, before, mask


def advantages_of_peer(epsilon: float) -> Tensor:
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    deviation = rewards.var(1, keepdim=True, correction=1).sqrt()
    return ((rewards - rewards.mean(1, keepdim=True)) / (deviation + epsilon)).reshape(-1, 1)


def loss_of_peer(preset: str, log_probs: Tensor, before: Tensor, mask: Tensor) -> Tensor:
    """With the defaults of the trainer, on matrices of responses."""
    ratio, bounded = (log_probs - before).exp(), (log_probs - before).exp().clamp(1 - 0.2, 1 + 0.2)
    if preset == "grpo-verl":
        a = advantages_of_peer(1e-6)
        losses = torch.maximum(-a * ratio, -a * bounded)
        losses = torch.where(a < 0, torch.minimum(losses, -3.0 * a), losses)
        return (losses * mask).sum() / mask.sum()
    a = advantages_of_peer(1e-4)
    losses = -torch.minimum(a * ratio, a * bounded) * mask
    if preset == "grpo-trl":
        return (losses.sum(1) / mask.sum(1).clamp(min=1)).mean()
    return losses.sum() / (mask.sum() if preset == "dapo-trl" else len(LENGTHS) * LONGEST)


def ours(objective: ObjectiveConfig, log_probs: Tensor, before: Tensor, mask: Tensor) -> Tensor:
    """The loss of the same responses, packed: no padding, and one mask for what is in the loss."""
    there = torch.cat([row * LONGEST + torch.arange(length) for row, length in enumerate(LENGTHS)])
    # A truncated response was sampled by the policy, and is out of the loss alone.
    sampled = mask.clone()
    sampled[5] = 1
    flat, old, loss_mask, model = (each.flatten()[there] for each in (log_probs, before, mask, sampled))
    advantages = batch_advantages(REWARDS, advantage_from_config(objective))
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    out = policy_loss(
        flat,
        old,
        torch.tensor(advantages),
        model,
        objective_from_config(objective),
        loss_mask=loss_mask,
        cu_seqlens=ends,
    )
    return out.loss


def with_gradient(loss: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
    *before, log_probs, old, mask = arguments
    variable = log_probs.clone().requires_grad_()
    value = loss(*before, variable, old, mask)
    value.backward()
    assert variable.grad is not None
    return value.detach(), variable.grad


@pytest.mark.parametrize("preset", NAMESAKE)
def test_a_preset_has_the_loss_of_the_other_trainer(preset: str) -> None:
    """And not that of the preset whose name it extends; advantages are float32, so the comparison is."""
    batch = drawn()
    (loss, gradient), (expected, slopes) = (
        with_gradient(ours, configured(preset), *batch),
        with_gradient(loss_of_peer, preset, *batch),
    )
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, slopes, rtol=1e-6, atol=1e-12)
    other, other_gradient = with_gradient(ours, configured(NAMESAKE[preset]), *batch)
    assert abs(other - expected) > 1e-3 * abs(expected)
    assert (other_gradient - slopes).abs().max() > 1e-3 * slopes.abs().max()


def test_the_batch_meets_what_the_presets_differ_in() -> None:
    """Both clips, the upper one of `dapo`, the dual bound, and a deviation that epsilon changes."""
    log_probs, before, mask = drawn()
    ratio, a = (log_probs - before).exp(), advantages_of_peer(1e-6)
    for met in (
        (a > 0) & (ratio > 1.28),
        (a > 0) & (ratio > 1.2) & (ratio < 1.28),
        (a < 0) & (ratio < 0.8),
        (a < 0) & (ratio > 3),
    ):
        assert (met & (mask > 0)).sum() >= 2
    assert (advantages_of_peer(1e-4)[4:8] / a[4:8]).max() < 0.995


def test_the_divisor_is_the_longest_response_unless_it_is_given() -> None:
    assert configured("dr-grpo-trl").loss_scale_factor == LONGEST
    assert configured("dr-grpo-trl", "objective.loss_scale_factor=7").loss_scale_factor == 7
    assert configured("dr-grpo").loss_scale_factor is None


def numbers(objective: ObjectiveConfig) -> dict[str, Any]:
    """What an objective stands for, under the names of the keys below `objective`."""
    resolved = resolved_objective(objective)
    window = resolved.pop("window")
    resolved |= {"clip_low": 1 - window["low"], "clip_high": window["high"] - 1, "clip_c": resolved.pop("dual")}
    del resolved["preset"], resolved["summary"], resolved["count_masked_sequences"]  # a mean over tokens has none
    return dict(flattened(resolved))


def read(cell: str) -> Any:
    """A value of the page."""
    words = {"off": None, "none": None, "rollout.max_response_tokens": LONGEST}
    return words[cell] if cell in words else float(cell) if cell[0].isdigit() else yaml.safe_load(cell)


def test_the_page_has_a_row_for_every_difference() -> None:
    text = (ROOT / "docs" / "objective.md").read_text(encoding="utf-8")
    table = text.partition("### As TRL and verl mean them\n")[2].partition("\n\nMinPRO")[0]
    told: dict[str, dict[str, tuple[Any, Any]]] = {}
    preset = ""
    for row in re.findall(r"^\| .*", table, re.MULTILINE)[1:]:
        name, _, key, value, other = (cell.strip(" `") for cell in row.strip("|").split("|"))
        preset, (namesake, _, others) = name or preset, other.partition("`: ")
        assert namesake == NAMESAKE[preset]
        told.setdefault(preset, {})[key] = read(value), read(others)
    found = {}
    for preset, namesake in NAMESAKE.items():
        of_peer, usual = numbers(configured(preset)), numbers(configured(namesake))
        differing = {key: (value, usual[key]) for key, value in of_peer.items() if value != usual[key]}
        found[preset] = {key: pytest.approx(pair) if key == "clip_high" else pair for key, pair in differing.items()}
    assert told == found
