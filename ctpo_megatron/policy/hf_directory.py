"""Writes a trained model as a Hugging Face directory, aside and then renamed; a failed export leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ctpo_megatron.base.exports import STEP_FILE, record_step
from ctpo_megatron.base.files import sync
from ctpo_megatron.config import ConfigError, Problem, is_replaceable
from ctpo_megatron.policy.checkpoint_files import CheckpointError, discard
from ctpo_megatron.policy.parallel import Layout

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
    if layout.rank == 0:
        aside = target.with_name(f".{target.name}.writing")
        problem = _write_aside(tensors, source, aside, shard_bytes, chat_template, step)
    deque(tensors, maxlen=0)  # also after a failure: the other ranks still gather
    layout.on_rank_zero(lambda: _publish(aside, target, problem))


def _write_aside(
    tensors: Iterator[tuple[str, torch.Tensor]],
    source: Path,
    aside: Path,
    shard_bytes: int,
    chat_template: str | None,
    step: int | None,
) -> OSError | None:
    """Write the whole directory; returns the error of the file system, if any."""
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
        return error
    return None


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
    discard(former)
    if target.exists():
        target.rename(former)
    aside.rename(target)
    sync(target.parent)
    discard(former)


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
