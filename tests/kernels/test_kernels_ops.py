"""The functions as operators of torch: opcheck, torch.compile in one graph, FakeTensor, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ctpo_kernels import (
    ctpo_loss,
    fused_linear_ctpo,
    linear_log_probs,
    ops,
    ops_loss,
    use_backend,
    vocab_parallel_log_probs,
)
from tests.kernels.heads import random_head
from tests.kernels.packings import same_bits

HEAD = ("", 0.8, 13, 4.0)  # group, temperature, vocabulary, soft-cap
KEYWORDS = (0.025, 0.05, None, 0.5, "log_power", "cumprod", "seq-mean-token-mean", 1.0)


@pytest.fixture(autouse=True)
def fresh_traces(harness: None) -> None:
    """Compiled code of one backend must not serve the other."""
    torch._dynamo.reset()


def operands() -> dict[str, Tensor]:
    """Arguments of `fused_linear_ctpo`, all labels valid, the operands differentiable."""
    head = random_head(3, [9, 0, 14, 3], width=6, vocab=13)
    batch = {name: v.nan_to_num(-1.0) if v.is_floating_point() else v for name, v in head.batch.items()}
    leaves = {"hidden": head.hidden.requires_grad_(), "weight": head.weight.requires_grad_()}
    return {**leaves, "labels": head.labels.clamp(min=0), **batch}


def calls() -> dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]]:
    """Function, arguments, names of those with a gradient."""
    given = operands()
    own = {name: given[name] for name in ("hidden", "weight", "labels")}
    tokens = {name: value for name, value in given.items() if name not in own}
    logits = (given["hidden"] @ given["weight"].T).detach().requires_grad_()
    log_probs = given["old_log_probs"].clone().requires_grad_()
    shared = {"temperature": 0.8, "return_entropy": True, "softcap": 4.0}
    return {
        "log_probs": (vocab_parallel_log_probs, {"logits": logits, "labels": own["labels"], **shared}, ("logits",)),
        "linear": (
            linear_log_probs,
            {**own, "mask": given["response_mask"], "chunk_size": 7, **shared},
            ("hidden", "weight"),
        ),
        "loss": (ctpo_loss, {"log_probs": log_probs, **tokens, "return_per_token": True}, ("log_probs",)),
        "fused": (fused_linear_ctpo, {**given, "entropy_coef": 0.1, "chunk_size": 7, **shared}, ("hidden", "weight")),
    }


def flat(found: Any) -> list[Tensor]:
    """Every tensor of a result."""
    if isinstance(found, Tensor):
        return [found]
    parts = found if isinstance(found, tuple) else [getattr(found, name) for name in found.__dataclass_fields__]
    return [tensor for part in parts for tensor in flat(part)]


def with_gradients(call: Any, arguments: dict[str, Any], names: tuple[str, ...]) -> list[Tensor]:
    out = flat(call(**arguments))
    scalar = sum((tensor.sum() for tensor in out if tensor.requires_grad), torch.zeros(()))
    return [*(tensor.detach() for tensor in out), *torch.autograd.grad(scalar, [arguments[n] for n in names])]


@pytest.mark.parametrize(
    ("backend", "name"),
    [("torch", "log_probs"), ("torch", "linear"), ("torch", "loss"), ("torch", "fused"), ("triton", "fused")],
    indirect=["backend"],
)
def test_compiled_as_one_graph(backend: str, name: str) -> None:
    """The same bits as the eager call, forward and backward; a trace does not see the backend, so one with Triton."""
    function, arguments, leaves = calls()[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    found, expected = with_gradients(compiled, arguments, leaves), with_gradients(function, arguments, leaves)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert same_bits(a, b)


@pytest.mark.parametrize("name", ["log_probs", "linear", "loss", "fused"])
def test_shapes_of_fake_tensors(name: str) -> None:
    function, arguments, _ = calls()[name]
    expected = flat(function(**arguments))
    with FakeTensorMode() as mode:
        fake = {key: mode.from_tensor(v) if isinstance(v, Tensor) else v for key, v in arguments.items()}
        found = flat(function(**fake))
    for a, b in zip(found, expected, strict=True):
        assert (a.shape, a.dtype, a.device, a.requires_grad) == (b.shape, b.dtype, b.device, b.requires_grad)


@pytest.mark.parametrize("name", ["log_probs", "linear", "loss", "fused"])
def test_opcheck(name: str) -> None:
    given = operands()
    labels, hidden, weight = given["labels"], given["hidden"], given["weight"]
    tokens = [given[key] for key in ("old_log_probs", "response_mask", "advantages", "cu_seqlens", "loss_mask")]
    loss = (*tokens, None, None, None, 5, None, *KEYWORDS)
    logits = (hidden @ weight.T).detach().requires_grad_()
    log_probs = given["old_log_probs"].clone().requires_grad_()
    operator, arguments = {
        "log_probs": (ops.log_probs, (logits, labels, *HEAD, True)),
        "linear": (
            ops.linear_log_probs,
            (hidden, weight, labels, given["response_mask"], *HEAD, 7, torch.float32, False, True),
        ),
        "loss": (ops_loss.loss_operator, (log_probs, *loss, "", True)),
        "fused": (
            ops_loss.fused_linear,
            (hidden, weight, labels, *loss, *HEAD, 7, torch.float32, False, "", True, False, 0.1, True, True, True),
        ),
    }[name]
    with use_backend("torch"):
        torch.library.opcheck(operator, arguments)


def test_one_graph_for_all_numbers_of_rows() -> None:
    graphs = 0

    def count(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        nonlocal graphs
        graphs += 1
        return graph

    compiled = torch.compile(vocab_parallel_log_probs, fullgraph=True, backend=count, dynamic=True)
    for rows in (5, 8, 64, 129):
        logits, labels = torch.randn(rows, 7), torch.randint(0, 7, (rows,))
        assert same_bits(compiled(logits, labels), vocab_parallel_log_probs(logits, labels))
    assert graphs == 1


def test_what_cannot_be_compiled_says_so() -> None:
    given = calls()
    _, arguments, _ = given["log_probs"]
    with pytest.raises(Exception, match=r"inplace_backward=True cannot be compiled: it overwrites the logits"):
        torch.compile(vocab_parallel_log_probs, fullgraph=True, backend="eager")(**arguments, inplace_backward=True)
    _, arguments, _ = given["fused"]
    arguments["weight"].main_grad = torch.zeros_like(arguments["weight"])
    with pytest.raises(Exception, match=r"accumulate_into_main_grad=True cannot be compiled: it adds to weight"):
        torch.compile(fused_linear_ctpo, fullgraph=True, backend="eager")(**arguments, accumulate_into_main_grad=True)
    with pytest.raises(Exception, match="gradient_scale cannot be compiled: it is no argument of the compiled op"):
        torch.compile(fused_linear_ctpo, fullgraph=True, backend="eager")(**arguments, gradient_scale=8.0)
