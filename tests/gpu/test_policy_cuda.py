"""The policy on a CUDA device: the same weights, the same log-probs as transformers in fp32 on the CPU."""

from __future__ import annotations

import itertools
from pathlib import Path

import models
import pytest
import torch

from ctpo_megatron.config import OptimizerConfig, PolicyConfig
from ctpo_megatron.objective import PolicyObjective
from ctpo_megatron.policy import Policy, join, leave, policy_gradient

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_log_probs_and_one_update(tmp_path: Path) -> None:
    model = models.build("qwen3-tied", tmp_path)
    layout = join(PolicyConfig(), seed=0)
    try:
        policy = Policy(PolicyConfig(), layout, tmp_path, temperature=1.0)
        policy.use_optimizer(OptimizerConfig(lr=1e-3), total_steps=1)
        (mini_batch,) = policy.mini_batches(models.trajectories(), models.advantages(), size=16)
        policy.anchor([mini_batch])
        for micro in mini_batch.micro_batches:
            bounds = micro.cu_seqlens.tolist()
            for start, end in itertools.pairwise(bounds):
                ids = micro.token_ids[start:end].cpu()
                with torch.no_grad():
                    logp = model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None]).squeeze(1)
                mask = micro.model_mask[start + 1 : end].cpu()
                found = micro.anchor_logp[start + 1 : end].cpu()
                torch.testing.assert_close(found[mask], logp[mask], atol=1e-3, rtol=0)
        update = policy.update(mini_batch, policy_gradient(PolicyObjective.preset("ctpo"), "proximal"))
        assert update.grad_norm > 0
    finally:
        leave()
