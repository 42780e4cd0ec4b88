"""What the detector has to see, each a function that a pretending rank runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from tests.rehearsal import synchronizations
from tests.rehearsal.synchronizations import Synchronization


def on_gpu(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device="cuda")


def on_host(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def _group() -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)


def _mixed_gather() -> object:
    _group()
    return dist.all_gather_into_tensor(on_gpu(3), on_host(3))


def _two_gpus() -> object:
    return on_gpu(3) + torch.ones(3, device="cuda:1")


def _backward() -> object:
    leaf = on_gpu(3).requires_grad_()
    leaf.register_hook(lambda gradient: gradient + on_host(3))
    return leaf.sum().backward()


REFUSED: dict[str, Callable[[], object]] = {
    "sum": lambda: on_gpu(3) + on_host(3),
    "in place": lambda: on_host().add_(on_gpu()),
    "concatenation": lambda: torch.cat([on_gpu(3), on_host(3)]),
    "stack of scalars": lambda: torch.stack([on_gpu(), on_host()]),
    "product": lambda: on_gpu(3, 3) @ on_host(3, 3),
    "lookup": lambda: on_gpu(3).index_select(0, torch.tensor([1])),
    "lookup on the host": lambda: on_host(3)[on_gpu(3).long()],
    "list": lambda: torch._foreach_add_([on_gpu(3), on_gpu(3)], [on_gpu(3), on_host(3)]),
    "view of what was moved": lambda: on_host(4).to("cuda").view(2, 2)[0] + on_host(2),
    "backward": _backward,
    "collective": _mixed_gather,
    "two GPUs": _two_gpus,
    "numpy": lambda: on_gpu(3).numpy(),
    "asarray": lambda: np.asarray(on_gpu(3)),
    "backend": lambda: dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1),
}

ALLOWED: dict[str, Callable[[], object]] = {
    "scalar of the host": lambda: on_gpu(3) * on_host(),
    "number": lambda: on_gpu(3) * 2.0,
    "index of the host": lambda: on_gpu(3)[torch.tensor([1])],
    "copy": lambda: on_gpu(3).copy_(on_host(3)),
    "numpy after a copy": lambda: on_gpu(3).cpu().numpy(),
    "choice": lambda: torch.where(on_gpu(3) > 0, on_gpu(3), 0.0),
    "counters of an optimizer": lambda: torch._foreach_add_([on_host(), on_host()], 1),
}

WAITS: dict[str, tuple[int, Callable[[], object]]] = {
    "item": (1, lambda: on_gpu().item()),
    "float": (1, lambda: float(on_gpu())),
    "bool": (1, lambda: bool(on_gpu())),
    "tolist": (1, lambda: on_gpu(3).tolist()),
    "cpu": (1, lambda: on_gpu(3).cpu()),
    "cpu, not waited for": (0, lambda: on_gpu(3).to("cpu", non_blocking=True)),
    "cuda": (1, lambda: on_host(3).cuda()),
    "cuda, not waited for": (0, lambda: on_host(3).to("cuda", non_blocking=True)),
    "copy_": (1, lambda: on_gpu(3).copy_(on_host(3))),
    "nonzero": (1, lambda: on_gpu(3).nonzero()),
    "mask": (1, lambda: on_gpu(3)[on_gpu(3) > 0]),
    "write through a mask": (0, lambda: on_gpu(3).index_put_((on_gpu(3) > 0,), on_gpu())),
    "index of the host": (1, lambda: on_gpu(3)[torch.tensor([1])]),
    "index": (0, lambda: on_gpu(3)[on_gpu(3).long()]),
    "unique": (1, lambda: on_gpu(3).unique()),
    "repeats": (1, lambda: on_gpu(3).repeat_interleave(on_gpu(3).long())),
    "tensor of numbers": (1, lambda: torch.tensor([1.0], device="cuda")),
    "zeros": (0, lambda: torch.zeros(3, device="cuda")),
    "equal": (1, lambda: torch.equal(on_gpu(3), on_gpu(3))),
    "synchronize": (1, lambda: torch.cuda.synchronize()),
    "on the host": (0, lambda: (on_host().item(), on_host(3).tolist(), on_host(3).nonzero())),
}


def refusals() -> dict[str, str]:
    """What each of REFUSED raised; nothing where it passed."""
    found = {}
    for name, action in REFUSED.items():
        try:
            action()
        except (RuntimeError, TypeError, ValueError) as error:
            found[name] = str(error)
    return found


def allow() -> list[str]:
    """Run ALLOWED to the end."""
    return [name for name, action in ALLOWED.items() if action() is not NotImplemented]


def waits() -> dict[str, int]:
    """How often the host waited in each of WAITS."""
    found = {}
    for name, (_, action) in WAITS.items():
        synchronizations.counted()
        action()
        found[name] = synchronizations.counted().total()
    return found


def spend(times: int) -> Counter[Synchronization]:
    """What is counted when a line of the policy waits so often in an update."""
    planted = compile("tensor.item()", "/somewhere/ctpo_megatron/policy/planted.py", "exec")
    synchronizations.counted()
    with synchronizations.phase("update"):
        for _ in range(times):
            exec(planted, {"tensor": on_gpu()})
    return synchronizations.counted()


def accelerator() -> dict[str, object]:
    """What `torch.accelerator` answers; a CUDA build of torch would ask its own driver."""
    names = ("is_available", "device_count", "current_stream")
    same = {name: getattr(torch.accelerator, name)() == getattr(torch.cuda, name)() for name in names}
    return {**same, "index": torch.accelerator.current_device_index() == torch.cuda.current_device()}


def devices() -> dict[str, object]:
    """What claimed tensors say of themselves."""
    tensor = torch.nn.Linear(2, 2).to("cuda").weight
    return {
        "device": tensor.device,
        "is_cuda": tensor.is_cuda,
        "type": tensor.detach().type(),
        "of a sum": (tensor + 1).device,
        "back": tensor.detach().cpu().device,
        "like": torch.zeros_like(tensor).device,
        "of the gradient": torch.autograd.grad(tensor.sum(), tensor)[0].device,
    }
