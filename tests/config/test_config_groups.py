"""Checks of filters, uniform groups and shaping: settings that could not do what they say."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ctpo_megatron.config import Config, check

Make = Callable[..., Config]


def found(config: Config) -> list[str]:
    return [f"{p.severity}: {p}" for p in check(config, 1, None, cuda=False)]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["rollout.filters=[truncated, {name: 'mine:truncated'}]"],
            'error: rollout.filters = ["truncated", "mine:truncated"]: holds 2 filters named truncated',
        ),
    ],
)
def test_problems(config_with: Make, overrides: list[str], expected: str) -> None:
    assert [text for text in found(config_with(*overrides)) if text.startswith(expected)], found(
        config_with(*overrides)
    )


def test_no_false_alarms(config_with: Make) -> None:
    assert found(config_with("rollout.filters=[void_turn, truncated, failed_tool]")) == []
