"""Output layers for the kernel tests: operands, the eager head they are compared with, and what a call allocates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ctpo_kernels import CTPOStats, ctpo_loss, fused_linear_ctpo
from tests.kernels.packings import random_batch
from tests.support.backends import use_backend

LENGTHS = [30, 0, 22, 17, 9, 1]


@dataclass
class Head:
    """Arguments of `fused_linear_ctpo`; padding rows of the weight are large, so that they cannot hide."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    batch: dict[str, Tensor]
    temperature: float = 1.0
    vocab_size: int | None = None

    def double(self) -> Head:
        """The same numbers in float64."""
        batch = {k: v.double() if v is not None and v.is_floating_point() else v for k, v in self.batch.items()}
        return Head(self.hidden.double(), self.weight.double(), self.labels, batch, self.temperature, self.vocab_size)

    def arguments(self) -> dict[str, Any]:
        names = ("hidden", "weight", "labels", "temperature", "vocab_size")
        return {**{name: getattr(self, name) for name in names}, **self.batch}


@dataclass(frozen=True)
class Swept:
    """What a head gave."""

    loss: Tensor
    log_probs: Tensor
    d_hidden: Tensor
    d_weight: Tensor
    stats: CTPOStats


def random_head(
    seed: int,
    lengths: list[int] = LENGTHS,
    *,
    width: int = 12,
    vocab: int = 37,
    padded: int = 0,
    dtype: torch.dtype = torch.float32,
    spread: float = 0.03,
    temperature: float = 1.0,
    padding: int = 0,
) -> Head:
    """Old log-probs lie `spread` around those that the head itself gives."""
    g = torch.Generator().manual_seed(seed)
    batch = random_batch(seed, lengths, padding=padding)
    n = batch.pop("log_probs").numel()
    hidden = torch.randn(n, width, generator=g).to(dtype)
    weight = torch.randn(vocab + padded, width, generator=g)
    weight[vocab:] = 5.0
    weight = weight.to(dtype)
    labels = torch.randint(0, vocab, (n,), generator=g)
    logits = (hidden.double() @ weight[:vocab].double().T) / temperature
    log_probs = logits.log_softmax(1).gather(1, labels[:, None]).squeeze(1)
    old = (log_probs + spread * torch.randn(n, generator=g)).float()
    labels[~batch["response_mask"]] = -1  # no label at all
    batch["old_log_probs"] = torch.where(batch["response_mask"], old, math.nan)
    return Head(hidden, weight, labels, batch, temperature, vocab if padded else None)


def eager(head: Head, **keywords: Any) -> Swept:
    """Autograd through the logits of all tokens and `ctpo_loss`; low-precision operands in float32 products."""
    dtype = torch.float64 if head.hidden.dtype == torch.float64 else torch.float32
    hidden, weight = head.hidden.clone().requires_grad_(), head.weight.clone().requires_grad_()
    logits = hidden.to(dtype) @ weight.to(dtype).T / head.temperature
    response = head.batch["response_mask"] != 0
    table = logits[:, : head.vocab_size].log_softmax(1)
    log_probs = table.gather(1, head.labels.clamp(min=0)[:, None]).squeeze(1)
    with use_backend("torch" if dtype == torch.float64 else None):
        loss, stats = ctpo_loss(log_probs=log_probs, **head.batch, **keywords)
    loss.backward()
    log_probs = torch.where(response, log_probs, 0.0).detach()
    return Swept(loss.detach(), log_probs, hidden.grad, weight.grad, stats)


def sweep(head: Head, call: Any = fused_linear_ctpo, **keywords: Any) -> Swept:
    """`fused_linear_ctpo` forward and backward; d_weight is `main_grad` where it goes there."""
    hidden, weight = head.hidden.clone().requires_grad_(), head.weight.clone().requires_grad_()
    if into_main_grad := keywords.get("accumulate_into_main_grad"):
        weight.main_grad = torch.zeros(weight.shape)
    arguments = {**head.arguments(), "hidden": hidden, "weight": weight}
    loss, stats, log_probs = call(**arguments, **keywords)
    loss.backward()
    return Swept(loss.detach(), log_probs, hidden.grad, weight.main_grad if into_main_grad else weight.grad, stats)


@dataclass
class Watch(TorchDispatchMode):
    """What torch dispatches inside of it.

    names: of the operations. products: matrix products (result rows x columns, inner size). largest: elements of the
    largest tensor that anything returned. devices: of the results. copies_into: how often, by address of the memory.
    """

    names: list[str] = field(default_factory=list)
    products: list[tuple[int, int, int]] = field(default_factory=list)
    largest: int = 0
    devices: set[str] = field(default_factory=set)
    copies_into: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        self.names.append(name)
        if name in ("mm", "addmm", "addmm_"):
            a, b = args[-2:]
            self.products.append((a.shape[0], b.shape[1], a.shape[1]))
        if name == "copy_":
            self.copies_into[args[0].untyped_storage().data_ptr()] += 1
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor):
                self.devices.add(tensor.device.type)
                if tensor.device.type != "meta":
                    self.largest = max(self.largest, tensor.untyped_storage().nbytes() // tensor.element_size())
        return out


def watched(call: Callable[[], Any]) -> Watch:
    """What `call` multiplied and allocated."""
    watch = Watch()
    with watch:
        call()
    return watch
