"""A user's objective in a file of its own trains as the built-in one does, on one rank and on two."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ctpo_megatron.base.extensions import activate
from ctpo_megatron.config import CorrectionConfig, Extension, ObjectiveConfig, PolicyConfig
from ctpo_megatron.policy import destroy_distributed, init_distributed
from tests.policy import models, objective_scenario
from tests.support import ranks

SOURCE = """
import torch
from ctpo_megatron.objective import ObjectiveOutput


def clipped(inputs, *, width, dual=3.0):
    ratio, a = (inputs.log_probs - inputs.old_log_probs).exp(), inputs.advantages
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(1 - width, 1 + width))
    loss = torch.where(a < 0, torch.minimum(loss, -a * dual), loss)
    if inputs.weights is not None:
        loss = loss * inputs.weights
    return ObjectiveOutput(loss, {"ratio": ratio, "micro_batches": (1.0, 0.5)})
"""
# The sampler's log-probs: ratios far from 1 on both sides, so that every bound acts.
BUILT_IN = ObjectiveConfig(preset="grpo", anchor="behaviour")
USERS = BUILT_IN.model_copy(update={"function": Extension(name="users_objective:clipped", arguments={"width": 0.2})})
DECOUPLED = {"anchor": "decoupled", "correction": CorrectionConfig(level="token", cap=2.0, veto=0.05)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("users")
    (folder / "users_objective.py").write_text(SOURCE)
    models.build("qwen3-tied", folder / "model")
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> Iterator[dict[tuple[str, str], dict[str, Any]]]:
    """(objective, head) -> metrics and weights after one update on one rank."""
    activate([folder])
    layout = init_distributed(PolicyConfig(), seed=0)
    objectives = {"built-in": BUILT_IN, "user's": USERS}
    decoupled = {f"decoupled {name}": o.model_copy(update=DECOUPLED) for name, o in objectives.items()}
    cases = [(name, head) for name in objectives for head in ("logits", "streaming")]
    cases += [(name, "streaming") for name in decoupled]
    yield {
        (name, head): objective_scenario.one_update(layout, folder / "model", (objectives | decoupled)[name], head)
        for name, head in cases
    }
    destroy_distributed()


def assert_same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("head", ["logits", "streaming"])
def test_one_update_equals_the_built_in_objective(trained: dict, folder: Path, head: str) -> None:
    found, expected = trained["user's", head], trained["built-in", head]
    assert_same_weights(found["weights"], expected["weights"])
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/ppo_kl"):
        assert found["metrics"][name] == pytest.approx(expected["metrics"][name], rel=1e-6)
    assert found["metrics"]["objective/ratio"] == pytest.approx(expected["metrics"]["pg_update/is_ratio/mean"], 1e-6)
    assert found["metrics"]["objective/micro_batches"] == 2
    assert expected["metrics"]["pg_update/clip/total/count"] > 0
    assert found["metrics"]["actor/grad_norm"] > 0.01


def test_correction_weights_reach_the_function(trained: dict) -> None:
    found, expected = trained["decoupled user's", "streaming"], trained["decoupled built-in", "streaming"]
    assert_same_weights(found["weights"], expected["weights"])
    assert found["metrics"]["actor/pg_loss"] == pytest.approx(expected["metrics"]["actor/pg_loss"], rel=1e-6)
    assert abs(expected["metrics"]["actor/pg_loss"]) > 1e-3


def test_two_ranks_give_the_result_of_one(trained: dict, folder: Path) -> None:
    found, _ = ranks.run(objective_scenario.on_every_rank, folder / "model", USERS, folder, ranks=2)
    expected = trained["user's", "streaming"]
    assert_same_weights(found["weights"], expected["weights"])
    for name in ("actor/pg_loss", "actor/grad_norm", "objective/ratio", "objective/micro_batches"):
        assert found["metrics"][name] == pytest.approx(expected["metrics"][name], rel=1e-5)
