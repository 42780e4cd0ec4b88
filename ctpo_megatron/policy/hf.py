"""Hugging Face weights in and out of the Megatron model: one table of names, split and merged per tensor."""

from __future__ import annotations

import json
import re
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from safetensors import safe_open

from ctpo_megatron.config import ConfigError, ModelFacts, Problem, Stored, is_replaceable, stored_tensors
from ctpo_megatron.policy import device
from ctpo_megatron.policy.model import BuiltModel, padded_vocab_size
from ctpo_megatron.policy.parallel import Layout
from ctpo_megatron.weights.tensor_file import TensorFile

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Rule:
    """How one Megatron parameter corresponds to one or more Hugging Face tensors.

    split: full HF tensors -> one shard per tensor-parallel rank; parts: one shard -> its part of each HF tensor.
    dim: along which the parts of all ranks, in their order, make the HF tensors; None: every rank has the whole.
    expert: None, or which of this rank's experts the parameter belongs to; `hf` then has a place for `{expert}`.
    padded: the joined tensor has rows behind those of the vocabulary.
    """

    hf: tuple[str, ...]
    split: Callable[[Tensors, ModelFacts, int], Tensors]
    parts: Callable[[torch.Tensor, ModelFacts], Tensors]
    dim: int | None
    expert: int | None = None
    padded: bool = False

    def names(self, experts_each: int, ep_rank: int) -> tuple[str, ...]:
        """Names on an expert-parallel rank that holds `experts_each` experts of a layer."""
        if self.expert is None:
            return self.hf
        return tuple(name.format(expert=ep_rank * experts_each + self.expert) for name in self.hf)


def _replicated(tensors: Tensors, facts: ModelFacts, tp: int) -> Tensors:
    return tensors * tp


def _rows(tensors: Tensors, facts: ModelFacts, tp: int) -> Tensors:
    return list(tensors[0].chunk(tp, dim=1))


def _split_vocab(tensors: Tensors, facts: ModelFacts, tp: int) -> Tensors:
    (weight,) = tensors
    rows = padded_vocab_size(weight.shape[0], tp)
    return list(F.pad(weight, (0, 0, 0, rows - weight.shape[0])).chunk(tp, dim=0))


def _split_qkv(tensors: Tensors, facts: ModelFacts, tp: int) -> Tensors:
    """q, k, v -> per key-value group: its query heads, its key head, its value head (Megatron's interleaving)."""
    groups, d = facts.num_key_value_heads, facts.head_dim
    packed = torch.cat([t.reshape(groups, -1, d, *t.shape[1:]) for t in tensors], dim=1)
    return list(packed.flatten(0, 2).chunk(tp, dim=0))


def _q_k_v(shard: torch.Tensor, facts: ModelFacts) -> Tensors:
    d, queries = facts.head_dim, facts.num_attention_heads // facts.num_key_value_heads
    by_group = shard.reshape(-1, queries + 2, d, *shard.shape[1:])
    return [part.flatten(0, 2) for part in by_group.split([queries, 1, 1], dim=1)]


def _split_gate_up(tensors: Tensors, facts: ModelFacts, tp: int) -> Tensors:
    gate, up = (t.chunk(tp, dim=0) for t in tensors)
    return [torch.cat(pair) for pair in zip(gate, up, strict=True)]


def _halves(shard: torch.Tensor, facts: ModelFacts) -> Tensors:
    return list(shard.chunk(2, dim=0))


def _whole(shard: torch.Tensor, facts: ModelFacts) -> Tensors:
    return [shard]


def _norm(*hf: str) -> Rule:
    return Rule(hf, _replicated, _whole, None)


_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ROWS = 1024
"""Of a vocabulary, compared at once."""
_CONFIG = "config.json"
_TEMPLATES = "additional_chat_templates"  # transformers' only folder within a model directory
_QKV = tuple(f"self_attn.{x}_proj" for x in "qkv")
_TOP = {
    "embedding.word_embeddings.weight": Rule((_EMBEDDING,), _split_vocab, _whole, 0, padded=True),
    "decoder.final_layernorm.weight": _norm("model.norm.weight"),
    "output_layer.weight": Rule((_HEAD,), _split_vocab, _whole, 0, padded=True),
}
_LAYER = {
    "input_layernorm.weight": _norm("input_layernorm.weight"),
    "self_attention.linear_qkv.layer_norm_weight": _norm("input_layernorm.weight"),  # the TE spec fuses the norm
    "self_attention.linear_qkv.weight": Rule(tuple(f"{n}.weight" for n in _QKV), _split_qkv, _q_k_v, 0),
    "self_attention.linear_qkv.bias": Rule(tuple(f"{n}.bias" for n in _QKV), _split_qkv, _q_k_v, 0),
    "self_attention.q_layernorm.weight": _norm("self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": _norm("self_attn.k_norm.weight"),
    "self_attention.linear_proj.weight": Rule(("self_attn.o_proj.weight",), _rows, _whole, 1),
    "pre_mlp_layernorm.weight": _norm("post_attention_layernorm.weight"),
    "mlp.linear_fc1.layer_norm_weight": _norm("post_attention_layernorm.weight"),
    "mlp.linear_fc1.weight": Rule(("mlp.gate_proj.weight", "mlp.up_proj.weight"), _split_gate_up, _halves, 0),
    "mlp.linear_fc2.weight": Rule(("mlp.down_proj.weight",), _rows, _whole, 1),
    "mlp.router.weight": Rule(("mlp.gate.weight",), _replicated, _whole, None),
}
_EXPERT = {
    "linear_fc1": Rule(
        ("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight"), _split_gate_up, _halves, 0
    ),
    "linear_fc2": Rule(("mlp.experts.{expert}.down_proj.weight",), _rows, _whole, 1),
}
_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT_NAMES = (
    re.compile(r"mlp\.experts\.local_experts\.(?P<expert>\d+)\.(?P<matrix>linear_fc[12])\.weight"),  # local spec
    re.compile(r"mlp\.experts\.(?P<matrix>linear_fc[12])\.weight(?P<expert>\d+)"),  # TE's grouped matrices
)


def rule_for(name: str, layer_number: Callable[[int], int]) -> Rule:
    """The rule of a parameter of a GPTModel, with full HF names. Raises KeyError naming an unknown one.

    layer_number: index of a layer in this model chunk -> its number in the whole model, from 0.
    """
    match = _LAYER_NAME.fullmatch(name)
    rule = _layer_rule(match[2]) if match else _TOP.get(name)
    if rule is None:
        raise KeyError(f"no Hugging Face counterpart is known for the Megatron parameter {name!r}")
    if match is None:
        return rule
    prefix = f"model.layers.{layer_number(int(match[1]))}."
    return replace(rule, hf=tuple(prefix + hf for hf in rule.hf))


def _layer_rule(name: str) -> Rule | None:
    for pattern in _EXPERT_NAMES:
        if match := pattern.fullmatch(name):
            return replace(_EXPERT[match["matrix"]], expert=int(match["expert"]))
    return _LAYER.get(name)


@dataclass(frozen=True)
class Entry:
    """One parameter of this rank, its name in Megatron, and its rule."""

    name: str
    parameter: torch.nn.Parameter
    rule: Rule


def _entries(model: BuiltModel) -> list[Entry]:
    entries = []
    for chunk in model.gpt:
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
        for name, parameter in chunk.named_parameters():
            if name == "output_layer.weight" and model.facts.tie_word_embeddings:
                continue  # later pipeline stages hold a copy of the embedding under this name
            entries.append(Entry(name, parameter, rule_for(name, numbers.__getitem__)))
    return entries


class WeightFiles:
    """The tensors of a Hugging Face model directory, read one by one."""

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self._stored = stored
        self._open: dict[Path, Any] = {}

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """One full tensor, or some of its rows, on the CPU, in the file's dtype."""
        path = self._stored[name].file
        if path not in self._open:  # a mixture of experts has thousands of tensors in one file
            self._open[path] = safe_open(path, "pt")
        file = self._open[path]
        return file.get_tensor(name) if rows is None else file.get_slice(name)[rows]


@torch.no_grad()
def load(model: BuiltModel, directory: Path, layout: Layout) -> None:
    """Copy the directory's weights into this rank's model (its layers, experts, tensor-parallel shards); collective.

    Raises ConfigError, before anything is copied, listing every tensor that is missing, unused, or of another shape
    than config.json makes it, and every file that is not whole; or when the two ends of a tied model differ.
    """
    stored, problems = stored_tensors(directory, model.facts)
    if problems:
        raise ConfigError(problems)
    files = WeightFiles(stored)
    if model.facts.tie_word_embeddings and _HEAD in stored:
        layout.on_rank_zero(lambda: _check_tied(files, stored[_HEAD].shape[0], directory))
    experts_each = model.facts.num_experts // layout.ep_size
    for entry in _entries(model):
        tensors = [files.read(name) for name in entry.rule.names(experts_each, layout.ep_rank)]
        group = _tensor_group(entry.rule)
        entry.parameter.copy_(entry.rule.split(tensors, model.facts, group.size())[group.rank()])
    if model.facts.tie_word_embeddings and layout.pp_size > 1 and layout.is_last_stage:
        shard = _split_vocab([files.read(_EMBEDDING)], model.facts, layout.tp_size)[layout.tp_rank]
        model.gpt[-1].output_layer.weight.copy_(shard)


def _check_tied(files: WeightFiles, rows: int, directory: Path) -> None:
    for start in range(0, rows, _ROWS):
        piece = slice(start, start + _ROWS)
        if not (files.read(_HEAD, piece) == files.read(_EMBEDDING, piece)).all():
            message = f"config.json ties the embeddings, but {_HEAD} differs from {_EMBEDDING}"
            fix = "set tie_word_embeddings: false there, or remove the tensor that is wrong"
            raise ConfigError([Problem("model.path", message, fix, str(directory))])


def _tensor_group(rule: Rule) -> dist.ProcessGroup:
    """The ranks that a parameter is cut over."""
    if rule.expert is None:
        return mpu.get_tensor_model_parallel_group()
    return mpu.get_expert_tensor_parallel_group()


def export(
    model: BuiltModel, layout: Layout, *, value: Callable[[torch.nn.Parameter], torch.Tensor] = torch.Tensor.detach
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (HF name, full tensor) for the whole model, one at a time, on every rank (all must iterate to the end).

    value: what to export of a parameter (its gradient, say), in its shape, detached.
    Tensor-parallel shards and experts are gathered, pipeline stages take turns to broadcast. Peak extra memory is one
    HF tensor, twice that where it is joined along its second dimension, times the expert-parallel size for an expert's:
    at most the largest Megatron parameter, if the consumer drops each tensor before it asks for the next. One that
    needs no gathering is the parameter itself.
    """
    stage = _stage_tensors(model, layout, value)
    if layout.pp_size == 1:
        yield from stage
        return
    for number in range(layout.pp_size):
        yield from _relay_stage(number, stage if layout.pp_rank == number else iter(()), layout)


def _stage_tensors(
    model: BuiltModel, layout: Layout, value: Callable[[torch.nn.Parameter], torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    for entry in _entries(model):
        yield from _full(entry.rule, value(entry.parameter), model.facts, layout)


def _full(rule: Rule, value: torch.Tensor, facts: ModelFacts, layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
    """The HF tensors that a parameter of this pipeline stage, and its counterparts on other ranks, are parts of."""
    experts_each = facts.num_experts // layout.ep_size
    for number, part in enumerate(rule.parts(value, facts)):
        names = [rule.names(experts_each, ep_rank)[number] for ep_rank in range(layout.ep_size)]
        tensor = _join(part, rule.dim, _tensor_group(rule))
        if rule.padded:
            tensor = tensor[: facts.vocab_size]
        if rule.expert is None or layout.ep_size == 1:
            yield names[0], tensor
        else:
            gathered = _join(tensor[None], 0, mpu.get_expert_model_parallel_group())
            yield from zip(names, gathered, strict=True)
            del gathered
        del tensor


def _join(part: torch.Tensor, dim: int | None, group: dist.ProcessGroup) -> torch.Tensor:
    """The parts of all ranks, joined along `dim`; without a copy where there is one, or none to join."""
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
        name, tensor = next(merged, (None, None))
        box = [None if tensor is None else (name, tuple(tensor.shape), tensor.dtype)]
        dist.broadcast_object_list(box, src=source, group=group, device=torch.device("cpu"))
        if box[0] is None:
            return
        name, shape, dtype = box[0]
        full = torch.empty(shape, dtype=dtype, device=layout.device) if tensor is None else tensor.contiguous()
        dist.broadcast(full, src=source, group=group)
        del tensor
        yield name, full
        del full


def write_directory(
    tensors: Iterator[tuple[str, torch.Tensor]], source: Path, target: Path, layout: Layout, shard_bytes: int = 4 << 30
) -> None:
    """Write a Hugging Face model directory: `tensors` in safetensors shards, everything else copied from `source`.

    config.json gets the precision that the tensors have (all the same).
    Every tensor goes to the disk before the next one is asked for; only rank 0 writes, the others take part in the
    gathering. Written aside and renamed; an existing model directory of that name is replaced. Raises ConfigError
    before anything is gathered if something else is there, or `source` itself, and OSError from the file system.
    """
    target = target.resolve()
    layout.on_rank_zero(lambda: _check_target(source.resolve(), target))
    if layout.rank != 0:
        deque(tensors, maxlen=0)
        return
    aside = target.with_name(f".{target.name}.writing")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    for file in source.iterdir():
        weights = file.suffix in {".safetensors", ".bin", ".pt"} or ".index." in file.name
        if file.is_file() and not weights and file.name != _CONFIG:
            shutil.copy2(file, aside / file.name)
    if (source / _TEMPLATES).is_dir():
        shutil.copytree(source / _TEMPLATES, aside / _TEMPLATES)
    shards = [TensorFile(aside / "part-1.safetensors")]
    for name, tensor in tensors:
        size = shards[-1].tensor_bytes
        full = size and size + tensor.numel() * tensor.element_size() > shard_bytes
        if full or not shards[-1].has_room_for(name):
            shards[-1].close()
            shards.append(TensorFile(aside / f"part-{len(shards) + 1}.safetensors"))
        shards[-1].add(name, tensor)
        dtype = tensor.dtype
        del tensor  # or it would stay while the next one is gathered
    shards[-1].close()
    _name_shards(aside, [sorted(shard.names) for shard in shards], sum(shard.tensor_bytes for shard in shards))
    (aside / _CONFIG).write_text(_config_of(dtype, source / _CONFIG), encoding="utf-8")
    if target.exists():
        shutil.rmtree(target)
    aside.rename(target)


def _config_of(dtype: torch.dtype, config: Path) -> str:
    """transformers and vLLM load in the precision that config.json says, which may be another than was trained in."""
    settings = json.loads(config.read_text(encoding="utf-8"))
    for key in ("dtype", *(key for key in ("torch_dtype",) if key in settings)):
        settings[key] = str(dtype).removeprefix("torch.")
    return json.dumps(settings, indent=2, ensure_ascii=False) + "\n"


def _check_target(source: Path, target: Path) -> None:
    """Nothing that is no export, nor the model that the tensors came from, is lost."""
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
    weight_map = {}
    for i, members in enumerate(names, start=1):
        final = f"model-{i:05d}-of-{len(names):05d}.safetensors"
        (directory / f"part-{i}.safetensors").rename(directory / final)
        weight_map |= dict.fromkeys(members, final)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
