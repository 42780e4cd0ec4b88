"""An engine in float16, as `policy.dtype: float16` asks for, with a trainer that sends it weights."""

from __future__ import annotations

import pytest
import torch

from tests.engines.pool_helpers import Stage, largest_log_prob_error, versions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROUNDING = 0.02
"""Nats; in float32 engines are within 1e-4 of the model."""


def test_log_probs_are_the_models_up_to_rounding(half_stage: Stage) -> None:
    assert half_stage.fleet.wait_ready().dtype == torch.float16
    assert 1e-5 < largest_log_prob_error(half_stage.model, half_stage.generate(half_stage.prompts(3))) < ROUNDING


def test_weights_are_rounded_to_it_and_compared(half_stage: Stage) -> None:
    """Float32 travels, whose sums the pool compares; an engine rounds what it loads."""
    half_stage.sync(0.02)
    groups = half_stage.generate(half_stage.prompts(3), step=1)
    assert versions(groups) == {half_stage.version}
    assert largest_log_prob_error(half_stage.model, groups) < ROUNDING
