"""Other people's kernels, one small function each. Every function imports what it needs when it is called.

Log-prob functions take `(logits, labels)` and return log-probs or losses per token `[N]`; head functions take a
`HeadCase` and return a scalar loss. An import that fails is the reason that the report gives for not running.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

import ctpo_kernels as ck
from benchmarks.kernels import eager
from benchmarks.kernels.measure import COMPILER, NotRun


@dataclass(frozen=True)
class HeadCase:
    """One batch of B sequences of equal length for the output layer.

    hidden: `[N, H]`, weight: `[V, H]`, both differentiable; labels, mask, old: `[N]`; advantages: `[B]`; cu: `[B + 1]`.
    """

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    old: Tensor
    mask: Tensor
    advantages: Tensor
    cu: Tensor

    def padded(self, values: Tensor) -> Tensor:
        """`[N]` -> `[B, L]`."""
        return values.view(self.advantages.numel(), -1)

    def eager_loss(self, log_probs: Tensor) -> Tensor:
        """The loss of the paper in eager torch."""
        return eager.loss(*map(self.padded, (log_probs.float(), self.old, self.mask)), self.advantages)[0]

    def compiled_loss(self, log_probs: Tensor) -> Tensor:
        """The same through torch.compile."""
        return _compiled_loss(log_probs.device.type)(
            *map(self.padded, (log_probs.float(), self.old, self.mask)), self.advantages
        )

    def kernel_loss(self, log_probs: Tensor) -> Tensor:
        """The same by `ctpo_loss`."""
        return ck.ctpo_loss(log_probs.float(), self.old, self.mask, self.advantages, self.cu)[0]


@functools.cache
def _compiled_loss(device: str) -> Callable[..., Tensor]:
    return torch.compile(lambda *batch: eager.loss(*batch)[0], dynamic=False, backend=COMPILER[device])


# Log-probs from logits.


def torch_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """float32 copy of the logits, PyTorch's own kernels."""
    return torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")


def megatron_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Megatron-core's eager vocabulary-parallel cross entropy, on a tensor-parallel group of one."""
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy

    _group_of_one()
    return vocab_parallel_cross_entropy(logits[:, None], labels[:, None])[:, 0]


def megatron_fused_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Megatron-core's jit-fused one."""
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    return fused_vocab_parallel_cross_entropy(logits[:, None], labels[:, None], _group_of_one())[:, 0]


def liger_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Liger's Triton kernel: the forward overwrites the logits with the gradient."""
    from liger_kernel.transformers.functional import liger_cross_entropy as function

    return function(logits, labels, reduction="none")


def transformer_engine_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """TransformerEngine's two kernels."""
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

    return parallel_cross_entropy(logits[None], labels[None], 0.0, False, None)[0]


def quack_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """quack's kernel with its in-place backward."""
    from quack.cross_entropy import cross_entropy

    return cross_entropy(logits, labels, reduction="none", inplace_backward=True)


LOGITS = {
    "torch cross_entropy": torch_cross_entropy,
    "Megatron-core eager": megatron_cross_entropy,
    "Megatron-core fused": megatron_fused_cross_entropy,
    "Liger": liger_cross_entropy,
    "TransformerEngine": transformer_engine_cross_entropy,
    "quack": quack_cross_entropy,
}


# Heads: hidden states to loss.


def full_logits_eager(case: HeadCase) -> Tensor:
    """Full logits in the operands' dtype, float32 softmax, eager loss."""
    return case.eager_loss(-torch_cross_entropy(case.hidden @ case.weight.t(), case.labels))


def full_logits_inplace(case: HeadCase) -> Tensor:
    """Full logits in the operands' dtype, one-pass log-probs with an in-place backward (ours), compiled loss."""
    logits = case.hidden @ case.weight.t()
    return case.compiled_loss(ck.vocab_parallel_log_probs(logits, case.labels, inplace_backward=True))


def megatron_head(case: HeadCase) -> Tensor:
    """Full logits, Megatron-core's eager cross entropy, eager loss."""
    return case.eager_loss(-megatron_cross_entropy(case.hidden @ case.weight.t(), case.labels))


def recompute_head(case: HeadCase) -> Tensor:
    """Our chunked head that computes the logits again in the backward, and our loss."""
    return case.kernel_loss(ck.linear_log_probs(case.hidden, case.weight, case.labels))


def liger_grpo(case: HeadCase) -> Tensor:
    """Liger's fused linear GRPO: a loss per token, clip .2."""
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="grpo")
    b = case.advantages.numel()
    hidden = case.hidden.view(b, -1, case.hidden.shape[1])
    result = loss(
        hidden,
        case.weight,
        case.padded(case.labels),
        case.padded(case.mask).to(torch.int64),
        case.advantages,
        old_per_token_logps=case.padded(case.old),
    )
    return result[0] if isinstance(result, tuple) else result


def liger_cross_entropy_head(case: HeadCase) -> Tensor:
    """Liger's fused linear cross entropy: no RL loss, a lower bound of its pipeline."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy(case.hidden, case.weight, case.labels)


def liger_scaled_head(case: HeadCase) -> Tensor:
    """Liger's fused scaled cross entropy per token (its Hopper kernel where it has one) and our loss."""
    from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

    found = LigerFusedLinearScaledCrossEntropyFunction.apply(case.hidden, case.weight, case.labels)
    return case.kernel_loss(-(found[0] if isinstance(found, tuple) else found))


def verl_head(case: HeadCase) -> Tensor:
    """verl's linear_cross_entropy and the eager loss."""
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    return case.eager_loss(linear_cross_entropy(case.hidden, case.weight, case.labels, 1.0)[0])


def quack_head(case: HeadCase) -> Tensor:
    """quack's chunked linear cross entropy: no RL loss, the speed of this pipeline."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return chunked_linear_cross_entropy(case.hidden, case.weight, case.labels)


def torch_linear_cross_entropy(case: HeadCase) -> Tensor:
    """PyTorch's chunked linear cross entropy: no RL loss."""
    function = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if function is None:
        raise NotRun(f"torch {torch.__version__} has no linear_cross_entropy")
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    return function(case.hidden, case.weight, case.labels, options=LinearCrossEntropyOptions())


HEADS = {
    "recompute (ours)": recompute_head,
    "full logits, in place, compiled loss": full_logits_inplace,
    "full logits, eager": full_logits_eager,
    "Megatron-core eager": megatron_head,
    "Liger fused linear GRPO": liger_grpo,
    "Liger fused linear CE (no RL loss)": liger_cross_entropy_head,
    "Liger scaled CE + our loss": liger_scaled_head,
    "verl + eager loss": verl_head,
    "quack chunked CE (no RL loss)": quack_head,
    "torch linear_cross_entropy (no RL loss)": torch_linear_cross_entropy,
}


def head_log_probs(name: str, case: HeadCase) -> Tensor:
    """Log-probs `[N]` of the heads that report them; raises NotRun for those that do not."""
    if name == "full logits":
        return -torch_cross_entropy(case.hidden @ case.weight.t(), case.labels)
    if name == "Liger scaled CE":
        from liger_kernel.ops.fused_linear_scaled_cross_entropy import LigerFusedLinearScaledCrossEntropyFunction

        found = LigerFusedLinearScaledCrossEntropyFunction.apply(case.hidden, case.weight, case.labels)
        return -(found[0] if isinstance(found, tuple) else found)
    if name == "verl":
        from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

        return linear_cross_entropy(case.hidden, case.weight, case.labels, 1.0)[0]
    raise NotRun(f"{name} reports no log-probs")


@functools.cache
def _group_of_one() -> dist.ProcessGroup:
    """Megatron's tensor-parallel group in a process that is alone."""
    from megatron.core import parallel_state

    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    return parallel_state.get_tensor_model_parallel_group()
