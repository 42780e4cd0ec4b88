"""The random streams of a rank, so that a resumed run draws the same numbers as an uninterrupted one."""

from __future__ import annotations

import random
from typing import Any, cast

import numpy
import torch
from megatron.core.tensor_parallel import random as megatron_random


def capture() -> dict[str, Any]:
    """State of Python's, numpy's, torch's and the device's generators and of megatron's named streams.

    Plain containers and tensors only: `torch.load` restores them without running code.
    """
    legacy = cast(tuple[str, numpy.ndarray[Any, Any], int, int, float], numpy.random.get_state())
    name, keys, position, has_gauss, cached = legacy
    return {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(keys.astype("int64")), int(position), int(has_gauss), float(cached)),
        "torch": torch.get_rng_state(),
        # On the CPU these two are replaced by functions of the CPU generator (replacements.py).
        "device": megatron_random._get_cuda_rng_state(),
        "streams": dict(megatron_random.get_cuda_rng_tracker().get_states()),
    }


def restore(state: dict[str, Any]) -> None:
    """Inverse of `capture`."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))
    megatron_random._set_cuda_rng_state(state["device"])
    torch.set_rng_state(state["torch"])
    megatron_random.get_cuda_rng_tracker().set_states(state["streams"])
