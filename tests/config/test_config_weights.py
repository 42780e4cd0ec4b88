"""Model directories before anything starts: every file that is missing or not whole, every tensor that does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

import pytest
from test_model_spec import write_model

from ctpo_megatron.checks import validate
from ctpo_megatron.config import Config, ConfigError, Job, read_spec
from ctpo_megatron.config.model_directory import stored_tensors
from ctpo_megatron.models import ModelSpec, Shape
from ctpo_megatron.plan.memory import model_parameters
from docs.site.sizing import MODELS

SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 6,
    "vocab_size": 10,
    "max_position_embeddings": 512,
}


def tensors_of(spec: ModelSpec) -> dict[str, Shape]:
    return spec.family.tensors(spec)


def write_tensors(file: Path, shapes: Mapping[str, Shape]) -> None:
    """A safetensors file of numbers, all zero, as the format's description has it."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + 2 * prod(shape)]}
        end += 2 * prod(shape)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A whole directory with two shards."""
    directory = write_model(tmp_path / "small", **SMALL)
    (directory / "tokenizer.json").touch()
    shapes = tensors_of(read_spec(directory))
    weight_map = {name: f"{'first' if '.0.' in name else 'second'}.safetensors" for name in shapes}
    for file in set(weight_map.values()):
        write_tensors(directory / file, {name: shapes[name] for name in shapes if weight_map[name] == file})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


Problems = Callable[[], list[str]]


@pytest.fixture
def problems(model: Path, config_with: Callable[..., Config]) -> Problems:
    """What `ctpo train --dry-run` says of the directory."""

    def check() -> list[str]:
        try:
            validate(config_with(f"model.path={model}"), Job(1))
        except ConfigError as caught:
            return [str(problem) for problem in caught.problems]
        return []

    return check


def add_to_index(model: Path, name: str, file: str) -> None:
    """A tensor to the index of the directory."""
    index = model / "model.safetensors.index.json"
    names = json.loads(index.read_text())
    names["weight_map"][name] = file
    index.write_text(json.dumps(names))


def test_a_whole_directory(model: Path, problems: Problems) -> None:
    assert problems() == []
    single = model.with_name("single")
    write_model(single, **SMALL)
    shapes = tensors_of(read_spec(single))
    write_tensors(single / "model.safetensors", shapes)
    stored, wrong = stored_tensors(single, read_spec(single))
    assert wrong == [] and {name: tensor.shape for name, tensor in stored.items()} == shapes


@pytest.mark.parametrize("name", MODELS)
def test_shapes_add_up_to_the_parameters_of_the_sizing_table(name: str) -> None:
    assert sum(map(prod, tensors_of(MODELS[name]).values())) == model_parameters(MODELS[name])[0]


def test_files_that_are_not_whole_are_all_named(model: Path, problems: Problems) -> None:
    (model / "first.safetensors").unlink()
    with (model / "second.safetensors").open("ab") as file:
        file.write(b"x")
    (model / "tokenizer.json").unlink()
    write_model(model, **SMALL, hidden_act="gelu")
    gelu, first, second, tokenizer = problems()
    assert "activation 'gelu'" in gelu
    assert "first.safetensors is missing; download or copy it again" in first
    size = (model / "second.safetensors").stat().st_size
    assert f"second.safetensors has {size} bytes, but its header asks for {size - 1}" in second
    assert "has no tokenizer: none of tokenizer.json, " in tokenizer


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"version https://git-lfs.github.com/spec/v1\n",
        b"\2\0\0\0\0\0\0\0[]",
        b"\7\0\0\0\0\0\0\0{",
        b'\x19\0\0\0\0\0\0\0{"a": {"shape": [1e999]}}',
    ],
)
def test_files_of_another_kind(model: Path, content: bytes, problems: Problems) -> None:
    (model / "first.safetensors").write_bytes(content)
    (text,) = problems()
    assert f"first.safetensors ({len(content)} bytes) is no safetensors file, or is cut short" in text


def test_a_folder_in_the_place_of_a_file(model: Path, problems: Problems) -> None:
    (model / "first.safetensors").unlink()
    (model / "first.safetensors").mkdir()
    (text,) = problems()
    assert "first.safetensors cannot be read: Is a directory" in text


def test_indexes_that_do_not_fit(model: Path, problems: Problems) -> None:
    def alone() -> str:
        (text,) = problems()
        return text

    index, single = model / "model.safetensors.index.json", model / "model.safetensors"
    add_to_index(model, "model.norm.weight", "first.safetensors")
    assert "named in the index, but not in its file: model.norm.weight" in alone()
    add_to_index(model, "model.norm.weight", "second.safetensors")
    single.touch()
    assert "has both model.safetensors, which transformers reads, and model.safetensors.index.json" in alone()
    single.unlink()
    index.write_text("[]")
    assert "model.safetensors.index.json is no index of tensors" in alone()
    index.unlink()
    assert "has neither model.safetensors nor model.safetensors.index.json; download or copy the model" in alone()
    (model / "pytorch_model.bin").touch()
    assert "safe_serialization=True" in alone()


@pytest.mark.parametrize("rows", [9, 11])
def test_tensors_that_do_not_fit_are_all_named(model: Path, rows: int, problems: Problems) -> None:
    write_model(model, **SMALL | {"vocab_size": rows, "num_hidden_layers": 3})
    found = problems()
    assert sum("missing: model.layers.2." in text for text in found) == len(found) - 1 == 11
    assert f"model.embed_tokens.weight is (10, 8), but config.json makes it ({rows}, 8)" in found[-1]
    write_model(model, **SMALL | {"num_hidden_layers": 8})
    found = problems()
    assert len(found) == 21 and "missing: 46 more tensors" in found[-1]
    write_model(model, **SMALL, tie_word_embeddings=False)
    (text,) = problems()
    assert "missing: lm_head.weight" in text


@pytest.mark.parametrize("offset", [0, 79, None])
def test_a_tied_model_with_another_head_is_refused(model: Path, offset: int | None, problems: Problems) -> None:
    third = model / "third.safetensors"
    add_to_index(model, "lm_head.weight", third.name)
    write_tensors(third, {"model.other.weight": (3, 8), "lm_head.weight": (10, 8)})
    data = bytearray(third.read_bytes())
    if offset is not None:
        data[len(data) - 160 + 2 * offset] = 1
    third.write_bytes(data)
    differs = "config.json ties the embeddings, but lm_head.weight differs from model.embed_tokens.weight; set tie_word"
    assert [differs in text for text in problems()] == [True] * (offset is not None)


@pytest.mark.parametrize("kind", ["I16", "F8_E4M3", "BOOL"])
def test_numbers_of_another_kind_are_refused(model: Path, kind: str, problems: Problems) -> None:
    file = model / "first.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["model.layers.0.self_attn.q_proj.weight"]["dtype"] = kind
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    (said,) = problems()
    assert f"is {kind}, which is none of F64, F32, F16, BF16" in said


def test_rotary_frequencies_of_old_files_are_ignored(model: Path, problems: Problems) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    write_tensors(model / "third.safetensors", {name: (16,)})
    add_to_index(model, name, "third.safetensors")
    assert problems() == []
    assert name not in stored_tensors(model, read_spec(model))[0]
