"""`ctpo export --check` on a run with a trained checkpoint: what passes, and what each kind of damage is called."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ctpo_megatron.cli import main
from ctpo_megatron.config import OptimizerConfig, PolicyConfig, chat_template_text, dump, load_config
from ctpo_megatron.export import layout_of, resolve
from ctpo_megatron.policy import Trainer, destroy_distributed, init_distributed
from ctpo_megatron.verify import check_exported
from tests.policy import models
from tests.policy.stepping import step
from tests.support import ranks
from tests.support.prefork import ROOT
from tests.support.task import SMALL_TASK, task_files, task_folder

STEP = "step_000003"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with one checkpoint, whose weights have left those of the model it began with."""
    root = tmp_path_factory.mktemp("export")
    settings = [*task_files(task_folder(*SMALL_TASK)), f"run.root={root}", "run.name=run"]
    config = load_config(ROOT / "configs" / "quickstart.yaml", settings)
    directory = root / "run"
    directory.mkdir()
    (directory / "config.yaml").write_text(dump(config))
    policy = Trainer(config.policy, init_distributed(config.policy, seed=0), Path(config.model.path), temperature=1.0)
    policy.use_optimizer(OptimizerConfig(lr=1e-2), total_steps=2)
    step(policy)  # whose tokens all are of the larger vocabulary of this model
    policy.save(directory / "checkpoints", 3, {"step": 3})
    destroy_distributed()
    return directory


@pytest.fixture(scope="module")
def exported(run: Path) -> Path:
    assert main(["export", str(run), "--check"]) == 0
    return run / f"model-{STEP}"


@pytest.fixture
def copy(exported: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "copy"))


def test_the_export_has_the_checkpoints_weights(run: Path, exported: Path) -> None:
    before = load_file(task_folder(*SMALL_TASK) / "model" / "model.safetensors")
    after = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).state_dict()
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert moved == list(before)


def test_an_export_is_checked_alone(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(exported), "--check"]) == 0
    printed = capsys.readouterr().out
    for what in ("tokenizer", "chat template", "generation config", "weights", "log-probs"):
        assert f"  {what} " in printed
    assert "FAILED" not in printed


def test_two_tensor_parallel_ranks_export_the_same(run: Path, exported: Path, tmp_path: Path) -> None:
    command = ["export", str(run / "checkpoints" / STEP), "--check", "--tensor-parallel", "2"]
    assert ranks.run(main, [*command, "--output", str(tmp_path / "two")], ranks=2) == [0, 0]
    one, two = (load_file(folder / "model.safetensors") for folder in (exported, tmp_path / "two"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_an_export_is_asked_what_the_run_was_asked(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(run, tmp_path / "run")
    settings = ["model.chat_template=qwen3", "model.chat_template_kwargs={enable_thinking: false}"]
    (other / "config.yaml").write_text(dump(load_config(other / "config.yaml", settings)))
    assert main(["export", str(other), "--check"]) == 0
    assert "as in training, without keywords" in capsys.readouterr().out
    exported = other / f"model-{STEP}"
    assert chat_template_text("qwen3") in (exported / "chat_template.jinja").read_text()
    (exported / "chat_template.jinja").write_text(chat_template_text("qwen3"))  # as exports were written before
    assert main(["export", str(exported), "--check"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "prompt FAILED" in said and "model.chat_template_kwargs" in said


def test_wrong_weights_are_found_by_their_log_probs(run: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The check of a checkpoint writes anew; so the comparison is called with an export spoiled afterwards."""
    weights = load_file(copy / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name] = weights[name] * 1.1
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    layout = init_distributed(PolicyConfig(), seed=0)
    policy = Trainer(PolicyConfig(), layout, task_folder(*SMALL_TASK) / "model", temperature=1.0)
    policy.load_weights(run / "checkpoints" / STEP)
    found = {finding.what: finding for finding in check_exported(copy, policy, layout)}
    destroy_distributed()
    assert [name for name, finding in found.items() if not finding.good] == ["weights", "log-probs"]
    assert "missing: model.layers.0.mlp.up_proj.weight" in found["weights"].detail
    assert f"differs: {name}" in found["weights"].detail


def failed(exported: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What alone failed in the check of an export, and the detail."""
    assert main(["export", str(exported), "--check"]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line]
    return [part.strip() for part in line.split("FAILED", 1)]


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("tokenizer.json", "tokenizer"),
        ("chat_template.jinja", "chat template"),
        ("generation_config.json", "generation config"),
    ],
)
def test_what_generation_needs_is_missed(file: str, what: str, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / file).unlink()
    assert failed(copy, capsys)[0] == what


def test_an_empty_tokenizer_is_no_tokenizer(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers 5 makes one of a class's name without a word."""
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    settings = {name: settings[name] for name in ("eos_token", "pad_token")} | {"tokenizer_class": "Qwen2Tokenizer"}
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    (copy / "tokenizer.json").unlink()
    for files, expected in (
        ({}, "has no tokenizer: none of tokenizer.json"),
        ({"vocab.json": '{"W": 0}', "merges.txt": "#version: 0.2\n"}, "makes 'W' of 'What is 6 times 7?'"),
    ):
        for name, text in files.items():
            (copy / name).write_text(text)
        what, detail = failed(copy, capsys)
        assert what == "tokenizer" and expected in detail


def test_files_that_are_not_whole_are_a_message(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert main(["export", str(copy), "--check"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ctpo: 1 problem") and "model.safetensors has" in error and "download or copy it" in error


def test_requests_that_cannot_be_met_say_why(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path)]) == 2
    assert "give a run directory, a checkpoint" in capsys.readouterr().err
    (tmp_path / "notes.txt").touch()
    assert main(["export", str(run), "--output", str(tmp_path)]) == 2
    assert "exists and is no exported model" in capsys.readouterr().err
    model = task_folder(*SMALL_TASK) / "model"
    assert main(["export", str(run), "--output", str(model)]) == 2
    assert f'--output = "{model}": would replace the model that was trained' in capsys.readouterr().err
    assert (model / "model.safetensors").is_file()
    lonely = shutil.copytree(run / "checkpoints" / STEP, tmp_path / "elsewhere" / STEP)
    assert main(["export", str(lonely)]) == 2
    error = capsys.readouterr().err
    assert (
        "give the directory that was trained: --model DIR" in error and "give the one to write: --output DIR" in error
    )
    assert main(["export", str(run), "--tensor-parallel", "3"]) == 2
    error = capsys.readouterr().err
    assert "--tensor-parallel = 3: x pipeline_model_parallel_size 1 = 3 does not divide the world size 1" in error
    assert "--tensor-parallel = 3: does not divide the model's 4 attention heads" in error
    for wrong in ("0", "-1"):
        with pytest.raises(SystemExit, match="2"):
            main(["export", str(run), "--pipeline-parallel", wrong])
        assert f"{wrong} is not a positive integer" in capsys.readouterr().err


def test_a_checkpoint_without_its_run(run: Path, tmp_path: Path) -> None:
    """The model's float64 is no precision of ours."""
    lonely = shutil.copytree(run / "checkpoints" / STEP, tmp_path / "elsewhere" / STEP)
    model = shutil.copytree(task_folder(*SMALL_TASK) / "model", tmp_path / "half")
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(settings | {"dtype": "float64"}))
    output = tmp_path / "new"
    assert main(["export", str(lonely), "--model", str(model), "--output", str(output), "--check"]) == 0
    assert json.loads((output / "config.json").read_text())["dtype"] == "float32"


def test_experts_are_exported_by_tensor_parallel_ranks_with_sequence_parallelism(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models.build("qwen3-moe", tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert layout_of(resolve(tmp_path, None, None), 2, 1).sequence_parallel
    assert not layout_of(resolve(tmp_path, None, None), 1, 2).sequence_parallel
