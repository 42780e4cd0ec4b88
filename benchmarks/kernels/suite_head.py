"""Suite C: output layer, log-probs, loss and gradients in one sweep, against bare matrix products and other heads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import ctpo_kernels as ck
from benchmarks.kernels import eager, rivals
from benchmarks.kernels.measure import Session
from benchmarks.kernels.rivals import HeadCase

SEQUENCE = 4096
# (tokens, hidden, vocabulary); the last is one of eight shards of the second.
SHAPES = {
    "8k, H 5120, V 151936": (8192, 5120, 151936),
    "32k, H 5120, V 151936": (32768, 5120, 151936),
    "32k, H 2560, V 151936": (32768, 2560, 151936),
    "32k, H 4096, V 131072": (32768, 4096, 131072),
    "32k, H 5120, V 18992": (32768, 5120, 18992),
}
QUICK = {"256, H 32, V 500": (256, 32, 500)}
CHUNKS = (1024, 2048, 4096, 8192)
FULL = "full logits, in place, compiled loss"
MAIN = "32k, H 5120, V 151936"
"""The shape at which chunk sizes, masks, clips and memory are varied."""

ALL_RIVALS = (MAIN, "32k, H 4096, V 131072")
"""The others are measured against full logits only: time on a GPU is short."""


def run(session: Session) -> None:
    """Measure every shape; raises AssertionError where the gate before the timings does not hold."""
    gate(session)
    shapes = QUICK if session.quick else SHAPES
    main = next(iter(QUICK)) if session.quick else MAIN
    for name in sorted(shapes, key=lambda shape: shape != main):
        tokens, hidden, vocabulary = shapes[name]
        flops = 2.0 * tokens * hidden * vocabulary
        case = make(session, tokens, hidden, vocabulary)
        bare_products(session, name, case)
        results = sum(t.numel() * t.element_size() for t in (case.hidden, case.weight))
        streaming = {"flops": 3 * flops, "ours": True, "subtract": results}
        session.measure("C", name, "streaming", lambda c=case: [step(fused, c)], count=True, **streaming)
        session.measure("C", name, "log-probs only", lambda c=case: [log_probs(c)], flops=flops, ours=True)
        rival_settings = {"flops": 3 * flops, "subtract": results}
        for rival, function in rivals.HEADS.items():
            if name not in ALL_RIVALS and rival != FULL and not session.quick:
                continue
            session.measure("C", name, rival, lambda f=function, c=case: [step(f, c)], **rival_settings)
        if name == main:
            vary(session, name, case, streaming)
        del case
        session.release()
    memory(session, shapes[main])


def vary(session: Session, name: str, case: HeadCase, streaming: dict) -> None:
    """Chunk sizes, masked rows and clipped rows at one shape."""
    for chunk in (64,) if session.quick else CHUNKS:
        session.measure("C", name, f"streaming, chunk {chunk}", lambda n=chunk: [step(fused, case, n)], **streaming)
    for masked in (0.5, 0.8):
        some = with_mask(case, masked)
        part = streaming | {"flops": streaming["flops"] * (1 - masked)}
        session.measure("C", f"{name}, {masked:.0%} masked", "streaming", lambda c=some: [step(fused, c)], **part)
        session.measure("C", f"{name}, {masked:.0%} masked", FULL, lambda c=some: [step(rivals.HEADS[FULL], c)])
    clipped = with_clip(case, 0.3)
    session.measure("C", f"{name}, 30% clipped", "streaming", lambda: [step(fused, clipped)], **streaming)


def memory(session: Session, shape: tuple[int, int, int]) -> None:
    """Peak of the sweep, which is the forward pass, above its results (d_weight in float32); 16 times the tokens."""
    _, hidden, vocabulary = shape
    chunk = 64 if session.quick else 2048
    for tokens in (128, 256) if session.quick else (8192, 32768, 131072):
        case = make(session, tokens, hidden, vocabulary)
        results = case.hidden.numel() * case.hidden.element_size() + 4 * case.weight.numel()
        session.measure(
            "C",
            f"memory, {tokens} tokens",
            "streaming",
            lambda c=case: [lambda: fused(c, chunk)],
            ours=True,
            subtract=results,
        )
        del case
        session.release()


def make(session: Session, tokens: int, hidden: int, vocabulary: int, seed: int = 0) -> HeadCase:
    """A batch whose ratios stay near 1: nothing is clipped, so no head gains from it."""
    torch.manual_seed(seed)
    device, dtype = session.device, session.dtype
    x = torch.randn(tokens, hidden, device=device, dtype=dtype)
    w = torch.randn(vocabulary, hidden, device=device, dtype=dtype) / hidden**0.5
    labels = torch.randint(0, vocabulary, (tokens,), device=device)
    sequences = max(1, tokens // (SEQUENCE if not session.quick else 64))
    return HeadCase(
        x.requires_grad_(),
        w.requires_grad_(),
        labels,
        old_log_probs(x, w, labels),
        torch.ones(tokens, dtype=torch.bool, device=device),
        torch.randn(sequences, device=device),
        torch.arange(sequences + 1, device=device) * (tokens // sequences),
    )


def old_log_probs(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Those of the same weights, moved a little."""
    with torch.no_grad():
        log_probs = ck.linear_log_probs(hidden, weight, labels)
    return log_probs + 1e-4 * torch.randn_like(log_probs)


def with_mask(case: HeadCase, masked: float) -> HeadCase:
    """The same batch with that share of rows masked."""
    return HeadCase(**vars(case) | {"mask": torch.rand_like(case.old) >= masked})


def with_clip(case: HeadCase, share: float) -> HeadCase:
    """The last tokens of every sequence beyond the high bound: a jump of 6 nats in S_t, above .05 sqrt(t) and below
    the cap."""
    old = case.padded(case.old.clone())
    old[:, int(old.shape[1] * (1 - share))] -= 6.0
    return HeadCase(**vars(case) | {"old": old.view(-1), "advantages": case.advantages.abs()})


def fused(case: HeadCase, chunk: int | None = None) -> Tensor:
    """Ours."""
    return ck.fused_linear_ctpo(
        case.hidden, case.weight, case.labels, case.old, case.mask, case.advantages, case.cu, chunk_size=chunk
    )[0]


def step(function: Callable[..., Tensor], case: HeadCase, *more: object) -> Callable[[], object]:
    """Forward and backward."""
    return lambda: torch.autograd.grad(function(case, *more), (case.hidden, case.weight))


def log_probs(case: HeadCase) -> Callable[[], object]:
    """The anchor pass."""
    hidden, weight = case.hidden.detach(), case.weight.detach()
    return lambda: ck.linear_log_probs(hidden, weight, case.labels)


def bare_products(session: Session, name: str, case: HeadCase) -> None:
    """The three matrix products of the head, unchunked, with outputs in the operands' dtype and in float32."""
    x, w = case.hidden.detach(), case.weight.detach()
    flops = 2.0 * x.shape[0] * x.shape[1] * w.shape[0]
    dtypes = {"operands' dtype": x.dtype} | ({"float32": torch.float32} if session.cuda else {})
    for label, out in dtypes.items():

        def product(a: Tensor, b: Tensor, out: torch.dtype = out) -> Tensor:
            return a @ b if out == a.dtype else torch.mm(a, b, out_dtype=out)

        def three(product: Callable[[Tensor, Tensor], Tensor] = product) -> list[Callable[[], object]]:
            z = x @ w.t()

            def call() -> None:
                product(x, w.t())
                product(z, w)
                product(z.t(), x)

            return [call]

        session.measure(
            "C", name, f"bare first product, out {label}", lambda p=product: [lambda: p(x, w.t())], flops=flops
        )
        session.measure("C", name, f"bare products, out {label}", three, flops=3 * flops)


def gate(session: Session) -> None:
    """Raises AssertionError unless gradients are at most twice as far from float64 as those of a torch run on the same
    operands with float32 accumulation, which rounds d logits and results to the operands' dtype."""
    case = make(session, 256, 256, 2000 if session.cuda else 300, seed=5)
    wanted = plain_gradients(case, torch.float64, torch.float64)
    rounded = plain_gradients(case, torch.float32, session.dtype)
    found = torch.autograd.grad(fused(case, 100), (case.hidden, case.weight))
    for name, got, exact, rival in zip(("d_hidden", "d_weight"), found, wanted, rounded, strict=True):
        error, allowed = (float((g.double() - exact).norm() / exact.norm()) for g in (got, rival))
        if not error <= 2 * allowed + 1e-6:
            raise AssertionError(f"fused_linear_ctpo: {name} is off by {error:.1e}, torch by {allowed:.1e}")


def plain_gradients(case: HeadCase, compute: torch.dtype, rounded: torch.dtype) -> tuple[Tensor, Tensor]:
    """d_hidden and d_weight by autograd through full logits; d logits and results pass through the dtype `rounded`."""
    x, w = (t.detach().to(compute) for t in (case.hidden, case.weight))
    z = (x @ w.t()).requires_grad_()
    log_probs = z.log_softmax(-1).gather(1, case.labels[:, None]).squeeze(1)
    dz = torch.autograd.grad(case_loss(case, log_probs), z)[0].to(rounded).to(compute)
    return (dz @ w).to(rounded), (dz.t() @ x).to(rounded)


def case_loss(case: HeadCase, log_probs: Tensor) -> Tensor:
    """The eager loss in the dtype of the log-probs."""
    parts = (case.padded(t) for t in (log_probs, case.old.to(log_probs.dtype), case.mask))
    return eager.loss(*parts, case.advantages.to(log_probs.dtype))[0]
