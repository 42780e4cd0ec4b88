"""Every tensor argument in every memory layout, on both backends, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ctpo_kernels import ctpo_loss, fused_linear_ctpo, linear_log_probs, vocab_parallel_log_probs
from tests.kernels.heads import Head, Swept, random_head
from tests.kernels.layouts import cover, laid_out
from tests.kernels.packings import Found, assert_reference, distance, random_batch, same_bits
from tests.kernels.reference import ctpo_loss_reference, exact_log_probs
from tests.kernels.test_kernels_head import assert_swept

ROWS, WIDTH, VOCAB = 11, 6, 13
TOLERANCE = 5e-6  # log-probs: nats; gradients: Frobenius, relative


def arranged(values: dict[str, Tensor], layouts: dict[str, str]) -> dict[str, Tensor]:
    """The arguments in their layouts, those of floats without NaN: "expanded" would show it everywhere.

    An expanded weight has one column for all, not one row: softmax of equal logits has no gradient.
    """
    clean = {name: value.nan_to_num(-1.0) if value.is_floating_point() else value for name, value in values.items()}
    given = {name: laid_out(value, layouts.get(name, "dense")) for name, value in clean.items()}
    if layouts.get("weight") == "expanded":
        given["weight"] = laid_out(values["weight"].T, "expanded").T
    return given


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("layouts", cover("logits", "labels", "g"), ids=str)
def test_given_logits(backend: str, layouts: dict[str, str], inplace: bool) -> None:
    values = {"logits": torch.randn(ROWS, VOCAB), "labels": torch.randint(VOCAB, (ROWS,)), "g": torch.randn(ROWS)}
    given = arranged(values, layouts)
    logits, labels, g = given["logits"].requires_grad_(), given["labels"], given["g"]
    exact = logits.detach().double().requires_grad_()
    expected, _ = exact_log_probs(exact, labels)
    if inplace and layouts["logits"] == "expanded":
        with pytest.raises(ValueError, match="inplace_backward: rows of the logits share memory"):
            vocab_parallel_log_probs(logits, labels, inplace_backward=True)
        return
    log_probs = vocab_parallel_log_probs(logits, labels, inplace_backward=inplace)
    (gradient,) = torch.autograd.grad(log_probs, logits, g)
    assert float((log_probs.double() - expected).detach().abs().max()) <= TOLERANCE
    assert distance(gradient, torch.autograd.grad(expected, exact, g.double())[0]) <= TOLERANCE
    assert not inplace or same_bits(logits.detach(), gradient)


@pytest.mark.parametrize("layouts", cover("hidden", "weight", "labels", "mask", "g"), ids=str)
def test_hidden_states(backend: str, layouts: dict[str, str]) -> None:
    values = {
        "hidden": torch.randn(ROWS, WIDTH),
        "weight": torch.randn(VOCAB, WIDTH),
        "labels": torch.randint(VOCAB, (ROWS,)),
        "mask": torch.arange(ROWS) % 3 != 1,
        "g": torch.randn(ROWS),
    }
    given = arranged(values, layouts)
    operands = given["hidden"].requires_grad_(), given["weight"].requires_grad_()
    exact = tuple(operand.detach().double().requires_grad_() for operand in operands)
    expected = exact_log_probs(exact[0] @ exact[1].T, given["labels"])[0] * given["mask"]
    log_probs = linear_log_probs(*operands, given["labels"], mask=given["mask"], chunk_size=4)
    assert float((log_probs.double() - expected).detach().abs().max()) <= TOLERANCE
    wanted = torch.autograd.grad(expected, exact, given["g"].double())
    for found, gradient in zip(torch.autograd.grad(log_probs, operands, given["g"]), wanted, strict=True):
        assert distance(found, gradient) <= TOLERANCE


PACKED = ("old_log_probs", "response_mask", "advantages", "loss_mask", "weights")


@pytest.mark.parametrize("layouts", cover("log_probs", *PACKED), ids=str)
def test_loss(backend: str, layouts: dict[str, str]) -> None:
    given = arranged(random_batch(5, [9, 0, 14, 3]), layouts)
    given["cu_seqlens"] = laid_out(given["cu_seqlens"], "strided")
    log_probs = given["log_probs"].requires_grad_()
    loss, stats, per_token = ctpo_loss(**given, return_per_token=True)
    (gradient,) = torch.autograd.grad(loss, log_probs)
    given["log_probs"] = log_probs.detach()
    assert_reference(Found(loss.detach(), gradient, stats, per_token), ctpo_loss_reference(**given))


@pytest.mark.parametrize("layouts", cover("hidden", "weight", "labels", *PACKED), ids=str)
def test_head(backend: str, layouts: dict[str, str]) -> None:
    head = random_head(6, [9, 0, 14, 3], width=WIDTH, vocab=VOCAB)
    arguments = {"hidden": head.hidden, "weight": head.weight, "labels": head.labels.clamp(min=0), **head.batch}
    given = arranged(arguments, layouts)
    operands = [given[name].requires_grad_() for name in ("hidden", "weight")]
    loss, stats, log_probs = fused_linear_ctpo(**given, chunk_size=7)
    found = Swept(loss.detach(), log_probs, *torch.autograd.grad(loss, operands), stats)
    names = {name: value.detach() for name, value in given.items()}
    assert_swept(found, Head(*(names.pop(name) for name in ("hidden", "weight", "labels")), batch=names))


@pytest.mark.parametrize("layout", ["dense", "strided"])
@pytest.mark.parametrize("form", ["one a sequence", "one a token"])
def test_advantages_as_a_column_or_a_row(backend: str, layout: str, form: str) -> None:
    """`[B, 1]` and `[1, N]` say which of the two is meant; flat tensors are guessed by their size."""
    batch = random_batch(7, [3, 0, 2, 4])
    flat: Any = torch.tensor([1.0, -2.0, 0.5, 3.0]) if form == "one a sequence" else torch.randn(9)
    shaped = flat[:, None] if form == "one a sequence" else flat[None]
    given = laid_out(shaped, layout)
    flat = given.reshape(-1)
    loss, _ = ctpo_loss(**{**batch, "advantages": given, "weights": given.abs()})
    assert same_bits(loss, ctpo_loss(**{**batch, "advantages": flat, "weights": flat.abs()})[0])


def test_flat_values_that_may_be_either_are_refused(backend: str) -> None:
    batch = {name: values[:3] for name, values in random_batch(8, [9]).items()}
    batch["cu_seqlens"] = torch.tensor([0, 2, 2, 3])
    batch["advantages"] = torch.tensor([1.0, 2.0, 3.0])
    for name in ("advantages", "weights"):
        shaped = {"advantages": batch["advantages"][:, None], "weights": torch.ones(3, 1), name: torch.ones(3)}
        with pytest.raises(ValueError, match=rf"{name} \[3\] may be one value per token .* \[1, 3\] or \[3, 1\]"):
            ctpo_loss(**{**batch, **shaped})
    batch |= {"log_probs": torch.zeros(3), "old_log_probs": None, "response_mask": torch.ones(3), "loss_mask": None}
    for shaped, expected in ((batch["advantages"][:, None], [-1, -1, -3]), (batch["advantages"][None], [-1, -2, -3])):
        per_token = ctpo_loss(**{**batch, "advantages": shaped, "weights": None}, return_per_token=True)[2]
        assert per_token.loss.tolist() == expected
