"""Weight updates of layers that vLLM packs for CPU kernels: an output layer that is the embedding, and experts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rollout.fleet_helpers import Stage, largest_log_prob_error, versions

pytestmark = pytest.mark.timeout(600)


def check_updates(stage: Stage) -> None:
    """Experts are packed only once, and a tied output layer receives no weights of its own: both could stay behind."""
    for step in (11, 12):
        stage.sync(0.05)
        groups = stage.generate(stage.prompts(1), step=step)
        assert versions(groups) == {stage.version}
        assert largest_log_prob_error(stage.model, groups) <= 1e-4


def test_an_update_reaches_experts(users_stage: Stage) -> None:
    check_updates(users_stage)


@pytest.mark.slow  # the quickstart's model is tied: tests/end_to_end/test_ring.py compares every log-prob after a sync
def test_an_update_reaches_an_output_layer_that_is_the_embedding(shared_ray: None, tmp_path: Path) -> None:
    stage = Stage(tmp_path, {"tie_word_embeddings": True})
    try:
        check_updates(stage)
    finally:
        stage.fleet.close()
