"""Suite A: the loss of given log-probs. Loss, gradient and statistics against eager torch and torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import ctpo_kernels as ck
from benchmarks.kernels import eager
from benchmarks.kernels.measure import COMPILER, Session

SHAPES = {"1 x 32768": (1, 32768), "4096 x 4096": (4096, 4096), "256 x 4096": (256, 4096)} | {
    "8 x 4096": (8, 4096),
    "64 x 512": (64, 512),
}
"""Those with a goal first: time on a GPU is short."""

QUICK = {"1 x 512": (1, 512), "16 x 32": (16, 32)}
MASKED = (0.0, 0.5)
BYTES_PER_TOKEN = 13
"""Log-prob, old log-prob and gradient in float32, a mask of one byte."""

GRADIENT_TOLERANCE = 1e-5
BOUND_WIDTH = 1e-4

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def run(session: Session) -> None:
    """Measure every shape; the gate of a shape comes before its timings and raises AssertionError."""
    for masked in MASKED[1:] if session.quick else MASKED:
        for name, (sequences, length) in (QUICK if session.quick else SHAPES).items():
            case = f"{name}, {masked:.0%} masked"
            gate(inputs(session, sequences, length, masked, seed=99))
            tokens = sequences * length
            sets = [
                inputs(session, sequences, length, masked, seed=seed)
                for seed in range(session.copies(BYTES_PER_TOKEN * tokens))
            ]
            moved = BYTES_PER_TOKEN * tokens
            common = {"bytes_moved": moved, "count": True}

            def calls(step: Callable[[Inputs], object], sets: list[Inputs] = sets) -> Sequence[Callable[[], object]]:
                return [lambda batch=batch: step(batch) for batch in sets]

            def compiled(sets: list[Inputs] = sets) -> Sequence[Callable[[], object]]:
                function = compiled_loss(session.device)
                return [lambda batch=batch: backward(function(*batch), batch) for batch in sets]

            session.measure("A", case, "forward", lambda c=calls: c(kernel), ours=True, graph=True, **common)
            session.measure("A", case, "forward + backward", lambda c=calls: c(kernel_step), ours=True, **common)
            session.measure("A", case, "torch.compile", compiled, **common)
            session.measure("A", case, "eager torch", lambda c=calls: c(eager_step), **common)
            session.measure("A", case, "eager torch + diagnostics", lambda c=calls: c(diagnostics_step), **common)
            del sets
            session.release()


def inputs(session: Session, sequences: int, length: int, masked: float, seed: int) -> Inputs:
    """log_probs, old, mask, advantages of padded sequences without padding, so that packed is a view."""
    generator = torch.Generator(session.device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=session.device)

    old = -normal(sequences, length).abs()
    log_probs = (old + 0.02 * normal(sequences, length)).requires_grad_()
    uniform = torch.rand(sequences, length, generator=generator, device=session.device)
    return log_probs, old, uniform >= masked, normal(sequences)


def kernel(batch: Inputs) -> Tensor:
    """Loss, statistics and gradient (kept for the backward) by `ctpo_loss`."""
    log_probs, old, mask, advantages = batch
    return ck.ctpo_loss(log_probs.view(-1), old.view(-1), mask.view(-1), advantages, boundaries(log_probs))[0]


_BOUNDARIES: dict[tuple[int, int, torch.device], Tensor] = {}


def boundaries(log_probs: Tensor) -> Tensor:
    """cu_seqlens of padded sequences, made once: a trainer has them on the device already."""
    sequences, length = log_probs.shape
    key = (sequences, length, log_probs.device)
    if key not in _BOUNDARIES:
        _BOUNDARIES[key] = torch.arange(sequences + 1, device=log_probs.device, dtype=torch.int64) * length
    return _BOUNDARIES[key]


def backward(value: Tensor, batch: Inputs) -> Tensor:
    """Gradient in the log-probs."""
    return torch.autograd.grad(value, batch[0])[0]


def kernel_step(batch: Inputs) -> Tensor:
    """Ours, with the backward."""
    return backward(kernel(batch), batch)


@functools.cache
def compiled_loss(device: str) -> Callable[..., Tensor]:
    """The eager loss without diagnostics through torch.compile."""
    return torch.compile(lambda *batch: eager.loss(*batch)[0], dynamic=False, backend=COMPILER[device])


def eager_step(batch: Inputs) -> Tensor:
    """Eager torch, with the backward."""
    return backward(eager.loss(*batch)[0], batch)


def diagnostics_step(batch: Inputs) -> Tensor:
    """Eager torch and its metrics, with the backward."""
    return backward(eager.loss_with_diagnostics(*batch)[0], batch)


def gate(batch: Inputs) -> None:
    """Raises AssertionError unless loss and gradient equal those of the formula in float64.

    Tokens whose ratio lies at a clip bound to within rounding are left out: either decision is right there.
    """
    log_probs, old, mask, advantages = batch
    exact = log_probs.detach().double().requires_grad_()
    value, log_ratio, scale = eager.loss(exact, old.double(), mask, advantages.double())
    wanted = torch.autograd.grad(value, exact)[0]
    found_value = kernel(batch)
    found = backward(found_value, batch).double()
    clear = ~eager.near_a_bound(log_ratio, scale, BOUND_WIDTH)
    error = float(((found - wanted)[clear]).norm() / wanted.norm())
    if not error <= GRADIENT_TOLERANCE:
        raise AssertionError(f"the gradient of ctpo_loss is off by {error:.1e} (relative)")
    difference = abs(float(found_value.detach()) - float(value.detach()))
    magnitude = float(wanted.abs().sum())
    if not difference <= 1e-3 * magnitude:
        raise AssertionError(f"the loss is off by {difference:.1e} (sum of gradients {magnitude:.1e})")
