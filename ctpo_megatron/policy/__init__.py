"""Policy: the Megatron-Core model under training, its parallel layout, optimizer steps, weights and checkpoints.

layout = init_distributed(config.policy, seed)                      process groups of this rank
policy = Policy(config.policy, layout, model_path, temperature=1.0)
policy.use_optimizer(optimizer_config, total_steps)
steps = policy.mini_batches(trajectories, advantages, size)
policy.compute_old_log_probs(steps)
updates = [policy.update(step, policy_gradient(objective, "proximal")) for step in steps]
policy.weights()                                        Hugging Face names and tensors, for sync and export
"""

# ruff: noqa: E402
import warnings

# megatron-core warns at import about every optional package that is absent; `capabilities()` says it in one line.
warnings.filterwarnings("ignore", module=r"megatron\.core")
# Calls of megatron-core's go through `device.scope()`, which their warnings are then ascribed to.
warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf", category=UserWarning)

from ctpo_megatron.policy.checkpoint_files import CheckpointError
from ctpo_megatron.policy.checkpoint_files import give_up as discard_checkpoints
from ctpo_megatron.policy.checkpoint_files import latest as latest_checkpoint
from ctpo_megatron.policy.checkpoint_files import read_marker as read_checkpoint_marker
from ctpo_megatron.policy.collectives import pending_collectives
from ctpo_megatron.policy.correction import apply_correction
from ctpo_megatron.policy.device import capabilities, max_ranks
from ctpo_megatron.policy.flops import peak_flops
from ctpo_megatron.policy.losses import configured_loss, policy_gradient, supervised
from ctpo_megatron.policy.minibatch import MiniBatch
from ctpo_megatron.policy.parallel import Layout, destroy_distributed, gather_objects, init_distributed
from ctpo_megatron.policy.rank_zero import RankLost, RankZero, RankZeroError
from ctpo_megatron.policy.reports import Diagnostics, Update, summarize_updates
from ctpo_megatron.policy.start import BatchStart
from ctpo_megatron.policy.trainer import Trainer

__all__ = [
    "BatchStart",
    "CheckpointError",
    "Diagnostics",
    "Layout",
    "MiniBatch",
    "RankLost",
    "RankZero",
    "RankZeroError",
    "Trainer",
    "Update",
    "apply_correction",
    "capabilities",
    "configured_loss",
    "destroy_distributed",
    "discard_checkpoints",
    "gather_objects",
    "init_distributed",
    "latest_checkpoint",
    "max_ranks",
    "peak_flops",
    "pending_collectives",
    "policy_gradient",
    "read_checkpoint_marker",
    "summarize_updates",
    "supervised",
]
