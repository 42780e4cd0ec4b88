"""Policy: the Megatron-Core model under training, its parallel layout, optimizer steps, weights and checkpoints.

    layout = init_distributed(config.policy, seed)                      process groups of this rank
    trainer = Trainer(config.policy, layout, model_path, temperature=1.0)
    trainer.prepare_rl(config.objective, config.rollout, ...)           sections of the configuration
    result = trainer.train(batch)                                       metrics and token diagnostics of an RL step
    trainer.weights()                                                   Hugging Face names and tensors

A supervised stage makes its steps one by one: `use_optimizer`, then `distribute` and `update` for each batch.
"""

# ruff: noqa: E402
import logging
import warnings

# megatron-core warns at import about every missing optional package; `capabilities()` reports them in one line.
warnings.filterwarnings("ignore", module=r"megatron\.core")
# megatron-core is called through `device.scope()`, so its warnings are attributed to torch, not to megatron.
warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf", category=UserWarning)
# Said by megatron-core 0.19: what follows `GPTModel` (megatron_versions.py), that it lays out the gradient buffers
# itself, or that a checkpoint is one of 0.16. Said at import by the compiler in torch's CUDA builds, which 0.19
# imports: no GPU.
for _name in (
    "models.gpt.gpt_model",
    "distributed.distributed_data_parallel",
    "dist_checkpointing.strategies.common",
):
    logging.getLogger(f"megatron.core.{_name}").setLevel(logging.ERROR)
# What a writer of checkpoints logs comes back as the error that `CheckpointStore` raises, in a sentence.
logging.getLogger("megatron.core.dist_checkpointing.strategies.filesystem_async").setLevel(logging.CRITICAL)
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

from ctpo_megatron.policy.megatron_import import import_megatron

import_megatron()

from ctpo_megatron.policy.checkpoint_files import (
    CheckpointError,
    CheckpointWriteError,
    discard_checkpoints,
    latest_checkpoint,
    read_checkpoint_marker,
)
from ctpo_megatron.policy.device import capabilities, device_name, gpu_bytes, max_ranks, product_precision
from ctpo_megatron.policy.hf import write_directory
from ctpo_megatron.policy.minibatch import MiniBatch
from ctpo_megatron.policy.old_log_probs import MismatchError, apply_correction, check_mismatch
from ctpo_megatron.policy.parallel import (
    Layout,
    RankLost,
    RankZeroError,
    destroy_distributed,
    gather_objects,
    init_distributed,
)
from ctpo_megatron.policy.passes import configured_loss, function_gradient, policy_gradient, supervised
from ctpo_megatron.policy.reports import StepOutcome, StepPositions, Update, gather_positions, summarize_updates
from ctpo_megatron.policy.trainer import Trainer, TrainResult
