"""Suite B: log-probs of given logits, forward and in-place backward, against the copy bandwidth."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import ctpo_kernels as ck
from benchmarks.kernels import rivals
from benchmarks.kernels.measure import Session
from ctpo_kernels import logprob
from ctpo_kernels.rows_torch import Shard

SHAPES = {"8192 x 151936": (8192, 151936), "32768 x 18992": (32768, 18992)}
QUICK = {"64 x 1000": (64, 1000)}
TOLERANCE = 5e-6
"""Absolute, nats: of the log-probs against float64 from the same logits."""


def run(session: Session) -> None:
    """Measure every shape; raises AssertionError where the gate before the timings does not hold."""
    for case, (rows, columns) in (QUICK if session.quick else SHAPES).items():
        gate(session, columns)
        torch.manual_seed(0)
        logits = (4 * torch.randn(rows, columns, device=session.device, dtype=session.dtype)).requires_grad_()
        labels = torch.randint(0, columns, (rows,), device=session.device)
        upstream = torch.randn(rows, device=session.device)
        size = logits.numel() * logits.element_size()
        common = {"count": True, "ours": True}
        session.measure("B", case, "forward", lambda x=logits, y=labels: [forward(x, y)], bytes_moved=size, **common)
        session.measure(
            "B",
            case,
            "backward in place",
            lambda x=logits, y=labels, g=upstream: [backward_only(x, y, g)],
            bytes_moved=2 * size,
            **common,
        )
        session.measure(
            "B",
            case,
            "forward + backward in place",
            lambda x=logits, y=labels, g=upstream: [step(ours, x, y, g)],
            bytes_moved=3 * size,
            ours=True,
        )
        for name, function in rivals.LOGITS.items():
            session.measure(
                "B",
                case,
                name,
                lambda f=function, x=logits, y=labels, g=upstream: [step(f, x, y, g)],
                bytes_moved=3 * size,
            )
        del logits
        session.release()


def ours(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probs whose backward overwrites the logits."""
    return ck.vocab_parallel_log_probs(logits, labels, inplace_backward=True)


def forward(logits: Tensor, labels: Tensor) -> Callable[[], object]:
    """The forward pass alone."""
    data = logits.detach()
    return lambda: ck.vocab_parallel_log_probs(data, labels)


def backward_only(logits: Tensor, labels: Tensor, upstream: Tensor) -> Callable[[], object]:
    """The backward pass alone, without autograd, which goes over overwritten logits only once.

    It reads and writes the same memory every time.
    """
    data, shard = logits.detach(), Shard(0, logits.shape[1])
    merged = logprob.forward_pass(data, labels, None, shard, 1.0, entropy=False)
    return lambda: logprob.backward_pass(data, data, labels, merged.lse, merged.entropy, upstream, None, shard, 1.0)


def step(
    function: Callable[[Tensor, Tensor], Tensor], logits: Tensor, labels: Tensor, upstream: Tensor
) -> Callable[[], object]:
    """Forward and backward. What in-place sides leave in the logits does not change how long they take."""

    def call() -> Sequence[Tensor]:
        leaf = logits.detach().requires_grad_()
        # A view: in-place kernels refuse to overwrite a leaf.
        return torch.autograd.grad(function(leaf.view_as(leaf), labels), leaf, upstream)

    return call


def gate(session: Session, columns: int) -> None:
    """Raises AssertionError unless log-probs and gradient equal float64 from the same logits."""
    torch.manual_seed(1)
    rows = 64
    logits = (4 * torch.randn(rows, columns, device=session.device, dtype=session.dtype)).requires_grad_()
    labels = torch.randint(0, columns, (rows,), device=session.device)
    upstream = torch.randn(rows, device=session.device)
    log_probs = ck.vocab_parallel_log_probs(logits, labels)
    found = torch.autograd.grad(log_probs, logits, upstream)[0].double()
    exact = logits.detach().double().requires_grad_()
    wanted_log_prob = exact.log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
    wanted = torch.autograd.grad(wanted_log_prob, exact, upstream.double())[0]
    error = float((log_probs.double() - wanted_log_prob).abs().max())
    # The gradient is rounded once to the dtype of the logits.
    allowed = 1e-5 + torch.finfo(session.dtype).eps
    relative = float((found - wanted).norm() / wanted.norm())
    if not (error <= TOLERANCE and relative <= allowed):
        raise AssertionError(f"log-probs are off by {error:.1e} nats, gradients by {relative:.1e} (relative)")
