"""Suite D: errors of log-probs and prefix sums against float64, and equality of bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import ctpo_kernels as ck
from benchmarks.kernels import rivals, suite_head
from benchmarks.kernels.measure import Session
from benchmarks.kernels.rivals import HeadCase
from ctpo_kernels.loss import loss_implementation, loss_stream
from ctpo_kernels.packed import LossTensors, PackedTokens
from ctpo_kernels.spec import FRACTION_BITS, LossSpec

SHAPE, QUICK_SHAPE = (4096, 2560, 151936), (256, 32, 500)
SAMPLE = 256
"""Rows whose log-probs are computed in float64."""


def run(session: Session) -> None:
    """Append one record a question; `value` is the answer."""
    tokens, hidden, vocabulary = QUICK_SHAPE if session.quick else SHAPE
    case = suite_head.make(session, tokens, hidden, vocabulary, seed=3)
    log_prob_errors(session, case)
    losses(session, case)
    repeatability(session, case)
    del case
    session.release()
    prefix_drift(session, 512 if session.quick else 32768)
    windows(session, 300 if session.quick else 32768)


def note(session: Session, case: str, side: str, **found: object) -> None:
    """One record of this suite."""
    session.records.append({"suite": "D", "case": case, "side": side, "ours": side == "ours", **found})


def log_prob_errors(session: Session, case: HeadCase) -> None:
    """Largest |log-prob - float64| (nats) over a sample of rows, for each head, from the same operands."""
    rows = torch.randperm(case.labels.numel(), device=session.device)[:SAMPLE]
    with torch.no_grad():
        weight = case.weight.double()
        exact = (case.hidden[rows].double() @ weight.t()).log_softmax(-1).gather(1, case.labels[rows, None]).squeeze(1)
        del weight
        found = ck.linear_log_probs(case.hidden, case.weight, case.labels)[rows]
        note(session, "largest log-prob error", "ours", value=float((found.double() - exact).abs().max()))
        for name in ("full logits", "Liger scaled CE", "verl"):
            note_rival(
                session,
                "largest log-prob error",
                name,
                lambda name=name: float((rivals.head_log_probs(name, case)[rows].double() - exact).abs().max()),
            )


def losses(session: Session, case: HeadCase) -> None:
    """How far the losses of the rivals with the same objective are from ours: a fast head must compute this one."""
    ours = float(suite_head.fused(case).detach())
    for name, function in rivals.HEADS.items():
        if "no RL loss" in name or "GRPO" in name:
            continue
        note_rival(session, "|loss - ours|", name, lambda f=function: abs(float(f(case).detach()) - ours))


def note_rival(session: Session, case: str, side: str, answer: Callable[[], float]) -> None:
    """The answer, or why there is none: a rival that cannot run must not take the suite along."""
    try:
        value = answer()
    except Exception as error:
        reason = (str(error).strip() or "no message").splitlines()[0]
        note(session, case, side, not_run=f"{type(error).__name__}: {reason}")
    else:
        note(session, case, side, value=value)


def repeatability(session: Session, case: HeadCase) -> None:
    """Whether two runs of the head give the same bits in loss, d_hidden and d_weight."""
    results = []
    for _ in range(2):
        loss = suite_head.fused(case)
        results.append([loss.detach(), *torch.autograd.grad(loss, (case.hidden, case.weight))])
    for name, first, second in zip(("loss", "d_hidden", "d_weight"), *results, strict=True):
        note(session, f"same bits twice: {name}", "ours", value=bool(torch.equal(first, second)))


def prefix_drift(session: Session, tokens: int) -> None:
    """Largest |S_t - float64| over one long sequence: fixed point, and a float32 cumulative sum beside it."""
    log_probs, old, batch = one_sequence(session, tokens)
    per_token = ck.ctpo_loss(*batch, return_per_token=True)[2]
    d = log_probs - old
    exact = d.double().cumsum(0)
    found = per_token.prefix.double() * 2.0**-FRACTION_BITS
    case = f"largest prefix error, {tokens} tokens"
    note(session, case, "ours", value=float((found - exact).abs().max()))
    note(session, case, "float32 cumsum", value=float((d.cumsum(0).double() - exact).abs().max()))


def windows(session: Session, tokens: int) -> None:
    """Whether gradient and final prefix have the same bits however the sweep is cut, and in one pass."""
    log_probs, _, given = one_sequence(session, tokens)
    batch = PackedTokens.of(log_probs, LossTensors(*given[1:]))
    spec = LossSpec(loss_agg_mode="token-mean")
    implementation = loss_implementation(log_probs)
    whole = implementation.loss_pass(batch, spec, 1.0).gradient
    for size in (tokens, 4096, 1000, 129):
        state = torch.zeros(batch.segments, 3, dtype=torch.int64, device=session.device)
        stream = loss_stream(batch, spec, 1.0, totals=None, state=state)
        parts = [stream.step(start, min(start + size, tokens)) for start in range(0, tokens, size)]
        equal = torch.equal(torch.cat(parts), whole)
        note(
            session, f"same bits in windows of {size}: gradient", "ours", value=bool(equal), prefix=state[:, 0].tolist()
        )


def one_sequence(session: Session, tokens: int) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """log_probs, old, and the positional arguments of `ctpo_loss`; every row is a response token."""
    torch.manual_seed(11)
    old = -torch.randn(tokens, device=session.device).abs()
    log_probs = old + 0.05 * torch.randn(tokens, device=session.device)
    mask = torch.ones(tokens, dtype=torch.bool, device=session.device)
    advantages = torch.full((1,), -0.5, device=session.device)
    return log_probs, old, (log_probs, old, mask, advantages, torch.tensor([0, tokens], device=session.device))
