"""Copies from memory that is not pinned, which a rehearsal refuses."""

from __future__ import annotations

import torch

from ctpo_megatron.base.host_copies import all_to_device
from tests.rehearsal import synchronizations


def refusals() -> list[str]:
    """What is said to each copy that is `non_blocking`, or "" where it is made; and what the tensors hold then."""
    device, host = torch.device("cuda", 0), torch.arange(5)
    copies = {
        "to": lambda: host.to(device, non_blocking=True),
        "cuda": lambda: host.cuda(non_blocking=True),
        "copy_": lambda: torch.zeros(5, dtype=torch.int64, device=device).copy_(host, non_blocking=True),
        "pinned": lambda: host.pin_memory()[1:].to(device, non_blocking=True),
        "a slab": lambda: torch.empty(5, pin_memory=True)[:3].to(device, non_blocking=True),
    }
    found = []
    for name, copy in copies.items():
        try:
            copy()
        except AssertionError as error:
            found.append(f"{name}: {str(error).partition(': ')[2]}")
    return found


def of_many_dtypes() -> tuple[list[bool], int]:
    """Whether each tensor of a copy has the numbers that it had, and how often the host waits."""
    device = torch.device("cuda", 0)
    given = [
        torch.arange(3, dtype=torch.int16),
        torch.ones(5, dtype=torch.bool),
        torch.empty(0, dtype=torch.int64),
        torch.tensor(2.5),
        torch.arange(12, dtype=torch.float64).view(3, 4).t(),
    ]
    synchronizations.counted()
    moved = all_to_device(given, device)
    waits = synchronizations.counted().total()
    same = [there.device == device and torch.equal(there.cpu(), here) for there, here in zip(moved, given, strict=True)]
    return same, waits
