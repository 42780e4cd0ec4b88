"""Hugging Face weights in and out of the Megatron model, tensor by tensor, and model directories written whole."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ctpo_megatron.base.exports import STEP_FILE, record_step
from ctpo_megatron.base.files import sync
from ctpo_megatron.config import ConfigError, Problem, check_tied, is_replaceable, stored_tensors
from ctpo_megatron.models import ModelSpec, ParamMapping, shard_vocabulary
from ctpo_megatron.policy import device
from ctpo_megatron.policy.checkpoint_files import CheckpointError
from ctpo_megatron.policy.model import BuiltModel
from ctpo_megatron.policy.parallel import Layout, gather_objects

_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class ModelParameter:
    """One parameter of this rank and how it is mapped.

    names: of its Hugging Face tensors, by expert-parallel rank, as each has other experts; the same everywhere for what
    is outside of experts. group: the ranks that it is sharded over.
    """

    parameter: torch.nn.Parameter
    mapping: ParamMapping
    names: list[list[str]]
    group: dist.ProcessGroup


def model_parameters(model: BuiltModel, layout: Layout) -> list[ModelParameter]:
    """Return all parameters of this rank. Raises KeyError naming a parameter without a Hugging Face counterpart."""
    spec, family, found = model.spec, model.spec.family, list[ModelParameter]()
    experts_each = spec.num_experts // layout.ep_size
    ends, in_layer = _by_name(family.ends(spec), spec), _by_name(family.layer(spec), spec)
    for chunk in model.gpt:
        for name, parameter in chunk.named_parameters():
            if name == "output_layer.weight" and spec.tie_word_embeddings:
                continue  # later pipeline stages hold a copy of the embedding under this name
            match = _LAYER_NAME.fullmatch(name)
            known = in_layer.get(match[2]) if match else ends.get(name)
            if known is None:
                raise KeyError(f"no Hugging Face counterpart is known for the Megatron parameter {name!r}")
            mapping, expert = known
            layer = chunk.decoder.layers[int(match[1])].layer_number - 1 if match else None
            prefix = "" if layer is None else family.layer_prefix.format(layer=layer)
            names = [
                [prefix + each.format(expert=ep_rank * experts_each + expert) for each in mapping.hf]
                for ep_rank in range(layout.ep_size)
            ]
            over = mpu.get_expert_tensor_parallel_group if mapping.per_expert else mpu.get_tensor_model_parallel_group
            found.append(ModelParameter(parameter, mapping, names, over()))
    return found


def _by_name(mappings: Iterable[ParamMapping], spec: ModelSpec) -> dict[str, tuple[ParamMapping, int]]:
    """Megatron's name -> mapping, and index of the expert on its rank."""
    found: dict[str, tuple[ParamMapping, int]] = {}
    for mapping in mappings:
        for expert in range(spec.num_experts if mapping.per_expert else 1):
            found |= {name.format(expert=expert): (mapping, expert) for name in mapping.megatron}
    return found


@torch.no_grad()
def load(model: BuiltModel, parameters: Sequence[ModelParameter], directory: Path, layout: Layout) -> None:
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
    # Files are kept open: a mixture of experts has thousands of tensors in one file.
    opened: Callable[[Path], Any] = cache(partial(safe_open, framework="pt"))

    def read(name: str) -> torch.Tensor:
        """Return a full tensor on the CPU, in the file's dtype."""
        tensor: torch.Tensor = opened(stored[name].file).get_tensor(name)
        return tensor

    broken: list[str] = []
    for entry in parameters:
        names = entry.names[layout.ep_rank]
        tensors = [read(name) for name in names]
        shards = entry.mapping.shard(tensors, spec, entry.group.size())
        entry.parameter.copy_(shards[entry.group.rank()])
        if not entry.parameter.isfinite().all():
            found = [name for name, tensor in zip(names, tensors, strict=True) if not tensor.isfinite().all()]
            broken += found or names
    if not_finite := sorted({name for part in gather_objects(broken) for name in part}):
        dtype = str(model.config.params_dtype).removeprefix("torch.")
        message = f"not finite (NaN, infinite or too large for {dtype}): {', '.join(not_finite)}"
        raise ConfigError([Problem("model.path", message, "download or copy the model again", str(directory))])
    if spec.tie_word_embeddings and layout.pp_size > 1 and layout.is_last_stage:
        shard = shard_vocabulary([read(family.embedding)], spec, layout.tp_size)[layout.tp_rank]
        model.gpt[-1].output_layer.weight.copy_(shard)


def export(
    parameters: Sequence[ModelParameter],
    spec: ModelSpec,
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
    stage = (tensor for entry in parameters for tensor in _full(entry, value(entry.parameter), spec, layout))
    if layout.pp_size == 1 or own_stage:
        yield from stage
        return
    for number in range(layout.pp_size):
        yield from _relay_stage(number, stage if layout.pp_rank == number else iter(()), layout)


Declared = list[tuple[str, tuple[int, ...], torch.dtype]]


def declare(parameters: Sequence[ModelParameter], layout: Layout) -> Declared:
    """HF name, shape and dtype of all that `export` yields, in its order, on every rank. No tensor is gathered."""
    of_stage: Declared = []
    for entry in parameters:
        names = entry.names if entry.mapping.per_expert else entry.names[:1]
        for number, shape in enumerate(entry.mapping.shapes):
            of_stage += [(of_rank[number], shape, entry.parameter.dtype) for of_rank in names]
    stages: list[Declared] = [of_stage] * layout.pp_size
    if layout.pp_size > 1:
        dist.all_gather_object(stages, of_stage, group=mpu.get_pipeline_model_parallel_group())
    return [tensor for stage in stages for tensor in stage]


def _full(
    entry: ModelParameter, value: torch.Tensor, spec: ModelSpec, layout: Layout
) -> Iterator[tuple[str, torch.Tensor]]:
    """The HF tensors made of a parameter of this pipeline stage and its counterparts on other ranks."""
    mapping, names = entry.mapping, entry.names
    for number, part in enumerate(mapping.unshard(value, spec)):
        tensor = _join(part, mapping.dim, entry.group)
        if mapping.padded:
            tensor = tensor[: spec.vocab_size]
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


_CONFIG = "config.json"
_CHAT_TEMPLATE = "chat_template.jinja"
_TEMPLATES = "additional_chat_templates"  # transformers' only folder within a model directory


def write_directory(
    tensors: Iterator[tuple[str, torch.Tensor]],
    source: Path,
    target: Path,
    layout: Layout,
    shard_bytes: int = 4 << 30,
    chat_template: str | None = None,
    step: int | None = None,
) -> None:
    """Write a Hugging Face model directory: `tensors` in safetensors shards, everything else copied from `source`.

    config.json gets the dtype of the tensors, which all have the same. chat_template: the Jinja text that the model was
    trained with, if it differs from the template of `source`. step: the RL step of the weights, which is recorded;
    None: of none. Permissions of the files follow the umask. Only rank 0 writes, which holds one shard in host memory;
    the others take part in the gathering. The directory is written aside and renamed once it is on
    disk; an existing model directory of that name is replaced.
    Raises ConfigError before anything is gathered if the target is something else, or `source` itself. Raises
    CheckpointError, and removes the new directory, when the file system fails.
    """
    target = target.resolve()
    layout.on_rank_zero(lambda: _check_target(source.resolve(), target))
    aside, problem = target.with_name(f".{target.name}.writing"), None
    if layout.is_rank_zero:
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            _copy_rest(source, aside)
            if chat_template is not None:
                (aside / _CHAT_TEMPLATE).write_text(chat_template, encoding="utf-8")
            if step is not None:
                record_step(aside, step)
            dtype = _write_shards(tensors, aside, shard_bytes)
            (aside / _CONFIG).write_text(_config_of(dtype, source / _CONFIG), encoding="utf-8")
            for path in (*aside.rglob("*"), aside):  # sync before an older model is deleted
                sync(path)
        except OSError as error:
            problem = error
    deque(tensors, maxlen=0)  # also after a failure: the other ranks still gather
    layout.on_rank_zero(lambda: _publish(aside, target, problem))


def _copy_rest(source: Path, aside: Path) -> None:
    for file in source.iterdir():
        weights = file.suffix in {".safetensors", ".bin", ".pt"} or ".index." in file.name
        if file.is_file() and not weights and file.name not in (_CONFIG, STEP_FILE):
            shutil.copyfile(file, aside / file.name)
    if (source / _TEMPLATES).is_dir():
        shutil.copytree(source / _TEMPLATES, aside / _TEMPLATES, copy_function=shutil.copyfile)


def _write_shards(tensors: Iterator[tuple[str, torch.Tensor]], aside: Path, shard_bytes: int) -> torch.dtype:
    """Write all tensors, and their index where there are several shards; returns their dtype. Raises OSError."""
    shards: list[list[str]] = []
    shard: dict[str, torch.Tensor] = {}
    total = 0
    for name, tensor in tensors:
        if shard and sum(each.nbytes for each in shard.values()) + tensor.nbytes > shard_bytes:
            shards.append(_write_shard(shard, aside, len(shards)))
            shard = {}
        # A copy: tensors may be parts of one parameter, which safetensors takes for one tensor under several names.
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        dtype, total = tensor.dtype, total + tensor.nbytes
        del tensor  # free it before the next one is gathered
    shards.append(_write_shard(shard, aside, len(shards)))
    _name_shards(aside, shards, total)
    return dtype


def _write_shard(shard: dict[str, torch.Tensor], aside: Path, number: int) -> list[str]:
    """Write a shard; returns its names. Raises OSError."""
    path = aside / f"part-{number + 1}.safetensors"
    try:
        save_file(shard, path, metadata={"format": "pt"})
        path.chmod(aside.stat().st_mode & 0o666)  # by the umask, as the folder; safetensors lets only the owner read
    except SafetensorError as error:  # the operating system's, as text
        code = re.search(r"\(os error (\d+)\)", str(error))
        raise OSError(int(code[1]), os.strerror(int(code[1]))) if code else OSError(str(error)) from error
    return sorted(shard)


def _publish(aside: Path, target: Path, problem: OSError | None) -> None:
    if problem is not None:
        free = shutil.disk_usage(aside.parent).free / 2**30
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(
            f"the model could not be written to {target}: {problem.strerror or problem}; {free:.1f} GiB were free "
            "there, and what was written of it is deleted"
        ) from problem
    # Rename first: an interrupted deletion would leave half a model, which no later export may replace.
    former = target.with_name(f".{target.name}.former")
    shutil.rmtree(former, ignore_errors=True)
    if target.exists():
        target.rename(former)
    aside.rename(target)
    sync(target.parent)
    shutil.rmtree(former, ignore_errors=True)


def _config_of(dtype: torch.dtype, config: Path) -> str:
    """config.json with the dtype of the exported tensors, in which transformers and vLLM load the model."""
    settings = json.loads(config.read_text(encoding="utf-8"))
    for key in ("dtype", *(key for key in ("torch_dtype",) if key in settings)):
        settings[key] = str(dtype).removeprefix("torch.")
    return json.dumps(settings, indent=2, ensure_ascii=False) + "\n"


def _check_target(source: Path, target: Path) -> None:
    """Only an earlier export may be replaced, never other files or the source model."""
    if source.is_relative_to(target):
        problem = Problem("export", f"would replace the model that was trained, {source}", "", str(target))
    elif not is_replaceable(target):
        problem = Problem("export", "exists and is no model directory (no config.json in it)", "", str(target))
    else:
        return
    raise ConfigError([replace(problem, fix="choose another directory")])


def _name_shards(directory: Path, names: list[list[str]], total: int) -> None:
    if len(names) == 1:
        (directory / "part-1.safetensors").rename(directory / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for i, members in enumerate(names, start=1):
        final = f"model-{i:05d}-of-{len(names):05d}.safetensors"
        (directory / f"part-{i}.safetensors").rename(directory / final)
        weight_map |= dict.fromkeys(members, final)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
