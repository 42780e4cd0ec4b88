"""The gradient of one optimizer step under each family's Hugging Face names, against transformers in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ctpo_megatron.config import PolicyConfig
from ctpo_megatron.objective import PolicyObjective
from ctpo_megatron.policy import Layout, Trainer, policy_gradient
from ctpo_megatron.verify import batch
from ctpo_megatron.verify.oracle import Reference
from tests.policy import models

TEMPERATURE = 0.7


# `ctpo verify` compares the gradients of Qwen3 and Qwen3-MoE under every layout.
@pytest.mark.parametrize(
    ("family", "dtype", "apart"),
    [("mistral", "float32", 1e-5), ("qwen2.5", "float32", 1e-5), ("mistral", "float16", 5e-3)],
)
def test_gradient_equals_transformers(family: str, dtype: str, apart: float, layout: Layout, tmp_path: Path) -> None:
    """In float16 without the loss scale, and without what is too small for it; not by oneDNN, whose products are less
    precise on a CPU that computes in float16."""
    torch.backends.mkldnn.enabled = dtype != "float16"
    try:
        check_gradient(family, dtype, apart, layout, tmp_path)
    finally:
        torch.backends.mkldnn.enabled = True


def check_gradient(family: str, dtype: str, apart: float, layout: Layout, tmp_path: Path) -> None:
    models.build(family, tmp_path)
    reference, objective = Reference(tmp_path, TEMPERATURE), PolicyObjective.preset("ctpo")
    trajectories = batch.trajectories(models.VOCAB, seed=4)  # float16 has no gradient that overflows
    for index, trajectory in enumerate(trajectories):
        log_probs = reference.rows(trajectory)[0].tolist()
        trajectory.tokens["rollout_log_probs"] = [
            value + batch.shift(index, t) if sampled else 0.0
            for t, (value, sampled) in enumerate(zip(log_probs, trajectory.response_mask, strict=True))
        ]
    expected = reference.evaluate(trajectories, batch.advantages(), {"ctpo": objective}).gradient["ctpo"]
    policy = Trainer(PolicyConfig(dtype=dtype), layout, tmp_path, temperature=TEMPERATURE)
    (mini_batch,) = policy.distribute(trajectories, batch.advantages(), size=len(trajectories))
    policy.compute_old_log_probs([mini_batch])
    _, gradients = policy.gradients(mini_batch, policy_gradient(objective, "behaviour"))
    found = {name: tensor.double().clone() for name, tensor in gradients}
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.linalg.vector_norm(found[name] - tensor) <= apart * torch.linalg.vector_norm(tensor), name
