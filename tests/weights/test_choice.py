"""Which transport carries the weights: by where the engines are, or as the configuration says."""

from __future__ import annotations

from typing import Any

import pytest

from ctpo_megatron.config import Config, Device, choose_transport


def a_config(mode: str, transport: str) -> Config:
    settings: dict[str, Any] = {"run": {"name": "a", "steps": 1}, "model": {"path": "m"}, "data": {"train": ["t"]}}
    return Config.model_validate(
        settings | {"placement": {"mode": mode}, "rollout": {"weights": {"transport": transport}}}
    )


@pytest.mark.parametrize(
    ("device", "mode", "transport"),
    [("cpu", "disaggregated", "tcp"), ("cuda", "colocated", "ipc"), ("cuda", "disaggregated", "nccl")],
)
def test_auto_goes_by_where_the_engines_are(device: Device, mode: str, transport: str) -> None:
    for configured, chosen in {"auto": transport, "tcp": "tcp"}.items():
        config = a_config(mode, configured)
        assert choose_transport(config.rollout.weights, config.placement, device) == chosen
