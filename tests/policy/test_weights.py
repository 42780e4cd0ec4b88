"""Hugging Face weights in and out: every tensor, every log-prob, and what is said when a directory does not fit."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from ctpo_megatron.config import ConfigError, PolicyConfig, read_spec
from ctpo_megatron.policy import CheckpointError, Layout, Trainer, write_directory
from tests.policy import models
from tests.policy.stepping import has_weights


def small(layout: Layout, folder: Path) -> Trainer:
    """Of a model in the folder `one` of this one."""
    models.build("qwen3-tied", folder / "one", layers=2)
    return Trainer(PolicyConfig(), layout, folder / "one", temperature=1.0)


@pytest.fixture(scope="module", params=list(models.FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    directory = tmp_path_factory.mktemp(request.param) / "model"
    return models.build(request.param, directory), directory


def reference_log_probs(model: PreTrainedModel, token_ids: torch.Tensor, temperature: float) -> torch.Tensor:
    with torch.no_grad():
        logits = model(token_ids[None]).logits[0].float() / temperature
    return logits.log_softmax(-1)[:-1].gather(1, token_ids[1:, None]).squeeze(1)


def test_log_probs_equal_transformers_and_weights_return_unchanged(
    family: tuple[PreTrainedModel, Path], layout: Layout, tmp_path: Path
) -> None:
    model, directory = family
    held = {name: tuple(tensor.shape) for name, tensor in load_file(directory / "model.safetensors").items()}
    spec = read_spec(directory)
    assert spec.family.tensors(spec) == held
    policy = Trainer(PolicyConfig(micro_batch_tokens=300), layout, directory, temperature=0.7)
    (mini_batch,) = policy.distribute(models.trajectories(), models.advantages(), size=16)
    policy.compute_old_log_probs([mini_batch])
    assert len(mini_batch.micro_batches) > 1
    for micro in mini_batch.micro_batches:
        bounds = micro.cu_seqlens.tolist()
        for start, end in itertools.pairwise(bounds):
            expected = reference_log_probs(model, micro.token_ids[start:end], temperature=0.7)
            mask = micro.response_mask[start + 1 : end]
            torch.testing.assert_close(
                micro.old_log_probs[start + 1 : end][mask], expected[mask], atol=1e-5, rtol=0, check_stride=False
            )
    policy.export(tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for name, tensor in model.state_dict().items():
        assert torch.equal(exported.state_dict()[name], tensor), name
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert (exported(ids).logits - model(ids).logits).abs().max() < 1e-4


def test_misfit_weights_are_all_named(layout: Layout, tmp_path: Path) -> None:
    models.build("qwen3-untied", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    weights["model.layers.1.mlp.bonus"] = torch.zeros(2)
    save_file(weights, tmp_path / "model.safetensors")
    # With these two the packed matrices have the right shape: only the tensors themselves tell.
    weights["model.layers.0.mlp.gate_proj.weight"] = torch.zeros(191, 96)
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(193, 96)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="4 problems") as caught:
        Trainer(PolicyConfig(), layout, tmp_path, temperature=1.0)
    assert "missing: model.norm.weight" in str(caught.value)
    assert "not used by this architecture: model.layers.1.mlp.bonus" in str(caught.value)
    assert "mlp.gate_proj.weight is (191, 96), but config.json makes it (192, 96)" in str(caught.value)


def test_a_number_that_is_not_finite_is_named_by_tensor(layout: Layout, tmp_path: Path) -> None:
    models.build("qwen3-tied", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"][0, 0] = torch.nan
    for dtype, beyond, named in (
        ("float32", 3.4e38, ""),
        ("bfloat16", 3.4e38, r", model\.norm\.weight"),  # which is infinite there
        ("float16", 65520.0, r", model\.norm\.weight"),
    ):
        weights["model.norm.weight"][0] = beyond
        save_file(weights, tmp_path / "model.safetensors")
        message = rf"too large for {dtype}\): model\.layers\.1\.self_attn\.k_proj\.weight{named};"
        with pytest.raises(ConfigError, match=message):
            Trainer(PolicyConfig(dtype=dtype), layout, tmp_path, temperature=1.0)


def test_an_export_replaces_nothing_but_an_export(layout: Layout, tmp_path: Path) -> None:
    policy = small(layout, tmp_path)
    (tmp_path / "link").symlink_to("one")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").touch()
    for name, message in (("one", "the model that was trained"), ("link", "the model that was"), ("notes", "no model")):
        with pytest.raises(ConfigError, match=message):
            policy.export(tmp_path / name)
    assert (tmp_path / "one" / "model.safetensors").is_file() and (tmp_path / "notes" / "a.txt").is_file()
    (tmp_path / "empty").mkdir()
    for _ in range(2):
        policy.export(tmp_path / "empty")
    assert (tmp_path / "empty" / "model.safetensors").is_file()


def test_an_export_that_does_not_fit_on_the_disk_leaves_nothing(
    layout: Layout, tmp_path: Path, file_limit: Callable[[int], AbstractContextManager[None]]
) -> None:
    policy = small(layout, tmp_path)
    message = rf"could not be written to {tmp_path}/out: File too large; \d+\.\d GiB were free there"
    with file_limit(300_000), pytest.raises(CheckpointError, match=message):
        policy.export(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    policy.export(tmp_path / "out")


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_an_export_says_its_precision_and_keeps_templates(key: str, layout: Layout, tmp_path: Path) -> None:
    models.build("qwen3-tied", tmp_path / "one", layers=2)
    settings = json.loads((tmp_path / "one" / "config.json").read_text())
    settings.pop("dtype")
    (tmp_path / "one" / "config.json").write_text(json.dumps(settings | {key: "float16"}))
    (tmp_path / "one" / "additional_chat_templates").mkdir()
    (tmp_path / "one" / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    Trainer(PolicyConfig(dtype="bfloat16"), layout, tmp_path / "one", temperature=1.0).export(tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == settings | {"dtype": "bfloat16", key: "bfloat16"}
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    assert (tmp_path / "out" / "additional_chat_templates" / "tools.jinja").read_text() == "{{ tools }}"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_others_may_read_an_export_as_the_umask_says(umask: int, mode: int, layout: Layout, tmp_path: Path) -> None:
    models.build("qwen3-tied", tmp_path / "one", layers=2)
    for file in (tmp_path / "one").iterdir():
        file.chmod(0o600)
    before = os.umask(umask)
    try:
        Trainer(PolicyConfig(), layout, tmp_path / "one", temperature=1.0).export(tmp_path / "out", "{{ messages }}")
    finally:
        os.umask(before)
    assert {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()} == dict.fromkeys(
        ("config.json", "generation_config.json", "model.safetensors", "chat_template.jinja"), mode
    )
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_an_export_that_is_cut_short_leaves_a_whole_model_or_none(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = small(layout, tmp_path)
    policy.export(tmp_path / "out")
    whole = sorted(file.name for file in (tmp_path / "out").iterdir())
    remove = shutil.rmtree

    def cut_short(path: Path, ignore_errors: bool = False) -> None:
        if path.exists() and path.name != ".out.writing":
            (path / "config.json").unlink()
            raise KeyboardInterrupt
        remove(path, ignore_errors)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", cut_short)
        policy.export(tmp_path / "out")
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == whole
    policy.export(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "out"]


def test_sharded_directories_are_read_and_written(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = small(layout, tmp_path)
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(Path(os.readlink(f"/proc/self/fd/{file}"))))
    write_directory(policy.weights(), tmp_path / "one", tmp_path / "many", layout, shard_bytes=200_000)
    written = [tmp_path / ".many.writing" / file.name for file in (tmp_path / "many").iterdir()]
    assert sorted(synced) == sorted([*written, tmp_path / ".many.writing", tmp_path])
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for _, tensor in policy.weights())
    again = Trainer(PolicyConfig(), layout, tmp_path / "many", temperature=1.0)
    assert has_weights(again, load_file(tmp_path / "one" / "model.safetensors"))
