"""Hugging Face weights in and out of the Megatron model, tensor by tensor, as the model's family maps them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from safetensors import safe_open

from ctpo_megatron.config import ConfigError, Problem, Stored, check_tied, stored_tensors
from ctpo_megatron.models import ModelSpec, ParamMapping, shard_vocabulary
from ctpo_megatron.policy import device
from ctpo_megatron.policy.model import BuiltModel
from ctpo_megatron.policy.parallel import Layout, gather_objects

_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class ModelParameter:
    """One parameter of this rank, how it is mapped, and its place in the model.

    prefix: of its Hugging Face names. expert: index among this rank's experts.
    """

    parameter: torch.nn.Parameter
    mapping: ParamMapping
    prefix: str = ""
    expert: int = 0

    def names(self, experts_each: int, ep_rank: int) -> list[str]:
        """Hugging Face names on an expert-parallel rank that holds `experts_each` experts of a layer."""
        expert = ep_rank * experts_each + self.expert
        return [self.prefix + name.format(expert=expert) for name in self.mapping.hf]

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that the parameter is sharded over."""
        over = mpu.get_expert_tensor_parallel_group if self.mapping.per_expert else mpu.get_tensor_model_parallel_group
        group: dist.ProcessGroup = over()
        return group


def entries(model: BuiltModel) -> Iterator[ModelParameter]:
    """All parameters of this rank. Raises KeyError naming a parameter without a Hugging Face counterpart."""
    spec, family = model.spec, model.spec.family
    ends, in_layer = _by_name(family.ends(spec), spec), _by_name(family.layer(spec), spec)
    for chunk in model.gpt:
        for name, parameter in chunk.named_parameters():
            if name == "output_layer.weight" and spec.tie_word_embeddings:
                continue  # later pipeline stages hold a copy of the embedding under this name
            match = _LAYER_NAME.fullmatch(name)
            found = in_layer.get(match[2]) if match else ends.get(name)
            if found is None:
                raise KeyError(f"no Hugging Face counterpart is known for the Megatron parameter {name!r}")
            layer = chunk.decoder.layers[int(match[1])].layer_number - 1 if match else None
            prefix = "" if layer is None else family.layer_prefix.format(layer=layer)
            yield ModelParameter(parameter, found[0], prefix, found[1])


def _by_name(mappings: Iterable[ParamMapping], spec: ModelSpec) -> dict[str, tuple[ParamMapping, int]]:
    """Megatron's name -> mapping, and index of the expert on its rank."""
    found: dict[str, tuple[ParamMapping, int]] = {}
    for mapping in mappings:
        for expert in range(spec.num_experts if mapping.per_expert else 1):
            found |= {name.format(expert=expert): (mapping, expert) for name in mapping.megatron}
    return found


class WeightFiles:
    """The tensors of a Hugging Face model directory, read one by one."""

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self._stored = stored
        self._open: dict[Path, Any] = {}

    def read(self, name: str) -> torch.Tensor:
        """A full tensor on the CPU, in the file's dtype."""
        path = self._stored[name].file
        if path not in self._open:  # kept open: a mixture of experts has thousands of tensors in one file
            self._open[path] = safe_open(path, "pt")
        tensor: torch.Tensor = self._open[path].get_tensor(name)
        return tensor


@torch.no_grad()
def load(model: BuiltModel, directory: Path, layout: Layout) -> None:
    """Copy the directory's weights into this rank's model (its layers, experts, tensor-parallel shards); collective.

    Raises ConfigError, before anything is copied, listing every tensor that is missing, unused, or of a shape that does
    not follow from config.json, and every truncated file. Also when input and output embeddings of a tied model differ.
    Values that are not finite are detected during the copy, and reported with their tensor.
    """
    spec, family = model.spec, model.spec.family
    stored, problems = stored_tensors(directory, spec)
    if problems:
        raise ConfigError(problems)
    layout.on_rank_zero(lambda: check_tied(directory, stored, spec))
    files = WeightFiles(stored)
    experts_each = spec.num_experts // layout.ep_size
    broken: list[str] = []
    for entry in entries(model):
        names = entry.names(experts_each, layout.ep_rank)
        tensors = [files.read(name) for name in names]
        shards = entry.mapping.shard(tensors, spec, entry.group.size())
        entry.parameter.copy_(shards[entry.group.rank()])
        if not entry.parameter.isfinite().all():
            found = [name for name, tensor in zip(names, tensors, strict=True) if not tensor.isfinite().all()]
            broken += found or names
    _check_finite(broken, model, directory)
    if spec.tie_word_embeddings and layout.pp_size > 1 and layout.is_last_stage:
        shard = shard_vocabulary([files.read(family.embedding)], spec, layout.tp_size)[layout.tp_rank]
        model.gpt[-1].output_layer.weight.copy_(shard)


def _check_finite(broken: list[str], model: BuiltModel, directory: Path) -> None:
    """Collective; broken: of this rank."""
    names = sorted({name for part in gather_objects(broken) for name in part})
    if names:
        dtype = str(model.gpt[0].config.params_dtype).removeprefix("torch.")
        message = f"not finite (NaN, infinite or too large for {dtype}): {', '.join(names)}"
        raise ConfigError([Problem("model.path", message, "download or copy the model again", str(directory))])


def export(
    model: BuiltModel,
    layout: Layout,
    *,
    value: Callable[[torch.nn.Parameter], torch.Tensor] = torch.Tensor.detach,
    own_stage: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (HF name, full tensor) of the whole model, one at a time, on every rank; all ranks must iterate to the end.

    value: what to export of a parameter, for example its gradient; in its shape, detached. own_stage: only the tensors
    of this rank's pipeline stage. Tensor-parallel shards and experts are gathered; pipeline stages broadcast in turn,
    unless each exports its own. Peak extra memory is one HF tensor: twice that if it is joined along its second
    dimension, and times the expert-parallel size for an expert. This is at most the largest Megatron parameter, if the
    consumer drops each tensor before requesting the next. A tensor that needs no gathering is the parameter itself.
    """
    stage = _stage_tensors(model, layout, value)
    if layout.pp_size == 1 or own_stage:
        yield from stage
        return
    for number in range(layout.pp_size):
        yield from _relay_stage(number, stage if layout.pp_rank == number else iter(()), layout)


Declared = list[tuple[str, tuple[int, ...], torch.dtype]]


def declare(model: BuiltModel, layout: Layout) -> Declared:
    """HF name, shape and dtype of all that `export` yields, in its order, on every rank. No tensor is gathered."""
    experts_each = model.spec.num_experts // layout.ep_size
    of_stage: Declared = []
    for entry in entries(model):
        ranks = range(layout.ep_size) if entry.mapping.per_expert else [layout.ep_rank]
        names = [entry.names(experts_each, ep_rank) for ep_rank in ranks]
        for number, shape in enumerate(entry.mapping.shapes):
            of_stage += [(of_rank[number], shape, entry.parameter.dtype) for of_rank in names]
    stages: list[Declared] = [of_stage] * layout.pp_size
    if layout.pp_size > 1:
        dist.all_gather_object(stages, of_stage, group=mpu.get_pipeline_model_parallel_group())
    return [tensor for stage in stages for tensor in stage]


def joined(part: torch.Tensor, entry: ModelParameter, spec: ModelSpec) -> torch.Tensor:
    """An HF tensor, joined from the parts on the ranks of its tensor-parallel group."""
    tensor = _join(part, entry.mapping.dim, entry.group)
    return tensor[: spec.vocab_size] if entry.mapping.padded else tensor


def _stage_tensors(
    model: BuiltModel, layout: Layout, value: Callable[[torch.nn.Parameter], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    for entry in entries(model):
        yield from _full(entry, value(entry.parameter), model.spec, layout)


def _full(
    entry: ModelParameter, value: torch.Tensor, spec: ModelSpec, layout: Layout
) -> Iterator[tuple[str, torch.Tensor]]:
    """The HF tensors made of a parameter of this pipeline stage and its counterparts on other ranks."""
    mapping, experts_each = entry.mapping, spec.num_experts // layout.ep_size
    names = [entry.names(experts_each, ep_rank) for ep_rank in range(layout.ep_size)]
    for number, part in enumerate(mapping.unshard(value, spec)):
        tensor = joined(part, entry, spec)
        if not mapping.per_expert or layout.ep_size == 1:
            yield names[0][number], tensor
        else:
            gathered = _join(tensor[None], 0, mpu.get_expert_model_parallel_group())
            yield from zip([of_rank[number] for of_rank in names], gathered, strict=True)
            del gathered
        del tensor


def _join(part: torch.Tensor, dim: int | None, group: dist.ProcessGroup) -> torch.Tensor:
    """The parts of all ranks, joined along `dim`; no copy for a single part or a replicated parameter."""
    if dim is None or group.size() == 1:
        return part
    stacked = part.new_empty(group.size(), *part.shape)
    device.gather_in_place(stacked, part, group)
    return stacked.flatten(0, 1) if dim == 0 else torch.cat(stacked.unbind(), dim=dim)


def _relay_stage(
    stage: int, merged: Iterator[tuple[str, torch.Tensor]], layout: Layout
) -> Iterator[tuple[str, torch.Tensor]]:
    """Broadcast one stage's tensors to all stages; `merged` is empty except on that stage."""
    group = mpu.get_pipeline_model_parallel_group()
    source = dist.get_process_group_ranks(group)[stage]
    while True:
        own = next(merged, None)
        box = [None if own is None else (own[0], tuple(own[1].shape), own[1].dtype)]
        dist.broadcast_object_list(box, src=source, group=group, device=torch.device("cpu"))
        if box[0] is None:
            return
        name, shape, dtype = box[0]
        full = torch.empty(shape, dtype=dtype, device=layout.device) if own is None else own[1].contiguous()
        dist.broadcast(full, src=source, group=group)
        del own
        yield name, full
        del full
