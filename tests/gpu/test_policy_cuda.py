"""The policy on a CUDA device: the same weights, the same log-probs as transformers in fp32 on the CPU."""

from __future__ import annotations

import gc
import math
from pathlib import Path

import pytest
import torch

from ctpo_megatron.config import OptimizerConfig, PolicyConfig
from ctpo_megatron.objective import PolicyObjective
from ctpo_megatron.policy import Trainer, destroy_distributed, init_distributed, policy_gradient
from tests.policy import models

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    ("family", "dtype", "tolerance"),
    [("qwen3-tied", "float32", 1e-3), ("qwen3-moe", "float32", 1e-3), ("qwen3-tied", "bfloat16", 0.1)],
)
def test_log_probs_and_one_update(family: str, dtype: str, tolerance: float, tmp_path: Path) -> None:
    model, config = models.build(family, tmp_path), PolicyConfig(dtype=dtype)
    layout = init_distributed(config, seed=0)
    try:
        policy = Trainer(config, layout, tmp_path, temperature=1.0)
        assert not torch.backends.cuda.cudnn_sdp_enabled()  # it keeps a plan for each shape
        policy.use_optimizer(OptimizerConfig(lr=1e-3), total_steps=1)
        (mini_batch,) = policy.distribute(models.trajectories(), models.advantages(), size=16)
        policy.compute_old_log_probs([mini_batch])
        for micro in mini_batch.micro_batches:
            for _, place in micro.places():
                ids, mask = micro.token_ids[place].cpu(), micro.response_mask[place][1:].cpu()
                with torch.no_grad():
                    log_probs = model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None]).squeeze(1)
                found = micro.old_log_probs[place][1:].cpu()
                torch.testing.assert_close(found[mask], log_probs[mask], atol=tolerance, rtol=0)
        update = policy.update(mini_batch, policy_gradient(PolicyObjective.preset("ctpo"), "proximal"))
        assert update.grad_norm > 0
    finally:
        destroy_distributed()


def test_offloading_gives_memory_back_and_changes_no_loss(tmp_path: Path) -> None:
    """Master weights, moments, gradients and parameters leave the device, and the next update is as without."""
    models.build("qwen3-tied", tmp_path)
    layout = init_distributed(PolicyConfig(), seed=0)
    try:
        losses, held, reserved, idle = {}, {}, {}, {}
        for offload in ("none", "all"):
            config = PolicyConfig(dtype="bfloat16", use_distributed_optimizer=True, offload=offload)
            policy = Trainer(config, layout, tmp_path, temperature=1.0)
            policy.use_optimizer(OptimizerConfig(lr=1e-3), total_steps=4)
            losses[offload] = []
            for _ in range(3):
                (mini_batch,) = policy.distribute(models.trajectories(), models.advantages(), size=16)
                policy.compute_old_log_probs([mini_batch])
                update = policy.update(mini_batch, policy_gradient(PolicyObjective.preset("ctpo"), "proximal"))
                losses[offload].append(update.grad_norm)
                del mini_batch
                policy.release()
            held[offload] = torch.cuda.memory_allocated()
            reserved[offload] = torch.cuda.memory_reserved()
            del policy
            gc.collect()
            torch.cuda.empty_cache()
            idle[offload] = torch.cuda.memory_allocated()  # the workspaces of cuBLAS, 68 MiB on an H200
        assert losses["all"] == pytest.approx(losses["none"], rel=1e-2)
        assert held["all"] - idle["all"] < (held["none"] - idle["none"]) / 2
        assert reserved["all"] < reserved["none"]  # other processes can have it
    finally:
        destroy_distributed()


def test_an_optimizer_step_copies_no_state(tmp_path: Path) -> None:
    """torch's AdamW would write out the roots of all second moments at once, 4 bytes a parameter."""
    models.build("qwen3-tied", tmp_path, layers=8, hidden_size=512, intermediate_size=2048)
    layout = init_distributed(PolicyConfig(), seed=0)
    try:
        config = PolicyConfig(dtype="bfloat16", use_distributed_optimizer=True, recompute="full")
        policy = Trainer(config, layout, tmp_path, temperature=1.0)
        policy.use_optimizer(OptimizerConfig(lr=1e-3), total_steps=2)
        (mini_batch,) = policy.distribute(models.trajectories(4), models.advantages(4), size=4)
        policy.compute_old_log_probs([mini_batch])
        for _ in range(2):  # the first makes the state
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            policy.update(mini_batch, policy_gradient(PolicyObjective.preset("ctpo"), "proximal"))
        parameters = sum(math.prod(shape) for _, shape, _ in policy.weight_shapes())
        assert parameters > 2e7 and torch.cuda.max_memory_allocated() - before < 2 * parameters
    finally:
        destroy_distributed()
