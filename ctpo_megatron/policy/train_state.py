"""The state of a rank that a checkpoint holds: weights, optimizer, schedule and random streams."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import numpy
import torch
from megatron.core import parallel_state as mpu
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import random as megatron_random

from ctpo_megatron.policy.model import BuiltModel
from ctpo_megatron.policy.parallel import Layout, gather_objects

# megatron-core 0.16 can no longer save the default format; this one reshards over TP, PP and DP.
FORMAT = {"distrib_optim_sharding_type": "fully_reshardable"}
_RATES = ("max_lr", "min_lr")
_CONFIGURED = (*_RATES, "betas", "eps")


@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of a rank, as a checkpoint stores it.

    settings: configuration keys that decide which tensors exist, with their values.
    """

    model: BuiltModel
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    settings: Mapping[str, Any]

    def shards(self, *, is_loading: bool) -> dict[str, Any]:
        """This rank's part of model and optimizer as megatron's sharded tensors."""
        # So that a checkpoint before the first step has the same tensors as any other.
        _fill_state(self.optimizer)
        metadata = _metadata()
        weights = self.model.sharded_state(metadata)
        optimizer = self.optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata)
        return {"model": weights, "optimizer": optimizer}

    def unsharded(self, layout: Layout) -> dict[str, Any]:
        """The state that is neither model nor optimizer; collective."""
        streams = {"layout": _sizes(layout), "ranks": gather_objects(random_streams())}
        return {"scheduler": self.scheduler.state_dict(), "random": streams}

    def restore(self, loaded: dict[str, Any], layout: Layout) -> bool:
        """Copy in what was loaded for `shards`.

        Random streams only in the layout that wrote them: a rank of another one has no counterpart. Returns whether it
        is the same.
        """
        self.model.load_state(loaded["model"])
        if _inner_adamw(self.optimizer):
            _name_step_zero(loaded["optimizer"])
        _name_rates(loaded["optimizer"], self.optimizer.param_groups[0])
        with _configured(self.optimizer):
            self.optimizer.load_state_dict(loaded["optimizer"])
        _separate_steps(self.optimizer)
        self.scheduler.load_state_dict(loaded["scheduler"])
        same_layout: bool = loaded["random"]["layout"] == _sizes(layout)
        if same_layout:
            set_random_streams(loaded["random"]["ranks"][layout.rank])
        return same_layout


def weight_shards(model: BuiltModel) -> dict[str, Any]:
    """This rank's weights as megatron's sharded tensors."""
    return model.sharded_state(_metadata())


def _metadata() -> dict[str, Any]:
    return FORMAT | {
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True),
    }


def _sizes(layout: Layout) -> dict[str, int]:
    names = (field.name for field in dataclasses.fields(layout) if field.name.endswith("_size"))
    return {name: getattr(layout, name) for name in names}


def random_streams() -> dict[str, Any]:
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


def set_random_streams(state: dict[str, Any]) -> None:
    """Inverse of `random_streams`."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))
    megatron_random._set_cuda_rng_state(state["device"])
    torch.set_rng_state(state["torch"])
    megatron_random.get_cuda_rng_tracker().set_states(state["streams"])


def _inner_adamw(optimizer: MegatronOptimizer) -> list[torch.optim.AdamW]:
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [o.optimizer for o in chained if isinstance(o.optimizer, torch.optim.AdamW)]


def _fill_state(optimizer: MegatronOptimizer) -> None:
    """Create the optimizer state that the first step would create, to save it or to load into it."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is not None:  # a rank may have no dense, or no expert parameters
            part.init_state_fn(part.optimizer, part.config)
    for inner in _inner_adamw(optimizer):
        for state in inner.state.values():
            # Megatron's own function omits the per-parameter `step` of torch's AdamW.
            state.setdefault("step", torch.zeros((), dtype=torch.float32))


def _name_step_zero(saved: dict[Any, Any]) -> None:
    """Megatron omits a step of 0 from a checkpoint (`if step:`), but AdamW cannot be loaded without it."""
    if isinstance(saved.get("state"), dict) and "param_groups" in saved:
        saved["state"].setdefault("common_step", torch.zeros((), dtype=torch.float32))
    for inner in saved.values():
        if isinstance(inner, dict):
            _name_step_zero(inner)


def _name_rates(saved: dict[Any, Any], group: Mapping[str, Any]) -> None:
    """Give saved parameter groups the configured rates of `group`, as all have the same: megatron-core 0.19 finds the
    group of a checkpoint by its rates, too."""
    for saved_group in saved.get("param_groups", ()):
        saved_group.update({name: group[name] for name in _RATES})
    for inner in saved.values():
        if isinstance(inner, dict):
            _name_rates(inner, group)


@contextmanager
def _configured(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Keep the configured values of every parameter group while a checkpoint is loaded.

    megatron-core restores whole groups from a checkpoint, and its scheduler prefers their rates to its own.
    """
    ours = [{name: group[name] for name in _CONFIGURED if name in group} for group in optimizer.param_groups]
    yield
    for group, values in zip(optimizer.param_groups, ours, strict=True):
        group.update(values)


def _separate_steps(optimizer: MegatronOptimizer) -> None:
    """Loading makes all parameters share one `step` tensor, which would then advance once per parameter."""
    for inner in _inner_adamw(optimizer):
        for state in inner.state.values():
            state["step"] = torch.as_tensor(state["step"]).clone()
