"""`sft.from`: another run's SFT, found at load, and refused where it is not what this configuration says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ctpo_megatron.base.run_paths import RunPaths
from ctpo_megatron.config import Config, ConfigError, Job, SftRecord, dump, load_config, read_sft_record
from ctpo_megatron.data import prepare
from ctpo_megatron.preflight import validate

CONFIG = """\
run: {name: a, steps: 4}
prepare:
  directory: ${run.root}/${run.name}/task
  seed: ${run.seed}
  train_prompts: 14
  heldout_prompts: 14
  sft_conversations: 40
  tokenizer_conversations: 200
model: {path: "${prepare.directory}/model"}
data: {train: ["${prepare.directory}/train.parquet"], max_prompt_tokens: 64}
sft: {data: ["${prepare.directory}/sft.parquet"], steps: 5, conversations_per_step: 4, optimizer: {lr: 2.0e-3}}
rollout:
  prompts_per_step: 8
  max_response_tokens: 176
  tool_parser: hermes
  engine: {max_model_len: 256, kv_cache_mb: 64, dtype: float32}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with my.yaml and the run `a`, which has done its SFT: the model that it kept is the prepared one."""
    folder = tmp_path_factory.mktemp("sft")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("my.yaml").write_text(CONFIG)
        config = load_config("my.yaml")
        assert config.prepare is not None
        prepare(config.prepare)
        keep(config)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, which is the current folder."""
    copy = shutil.copytree(made, tmp_path / "copy")
    monkeypatch.chdir(copy)
    return copy


def keep(config: Config) -> None:
    paths = RunPaths(config.run.directory)
    paths.config.write_text(dump(config))
    shutil.copytree(config.model.path, paths.sft_model)
    SftRecord.of(config).write(paths.root)


def found(*overrides: str, file: str = "my.yaml") -> tuple[list[str], list[str]]:
    """Errors and warnings of the keys that are about it."""
    try:
        config = load_config(file, ["run.name=b", "sft.from=runs/a", *overrides])
        warnings = validate(config, Job(1), cuda=False)
    except ConfigError as error:
        return [str(problem) for problem in error.problems if problem.failed], []
    return [], [str(problem) for problem in warnings if "sft.from" in str(problem)]


def test_the_configuration_of_the_other_run_is_right(folder: Path) -> None:
    assert found() == ([], [])
    shutil.copytree("runs/a/task", "runs/b/task")
    assert found() == ([], [])  # compared with the model itself now


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ("sft.steps=6", "sft.steps = 6: has no effect, and the SFT of runs/a (sft.from) was done with 5"),
        ("sft.optimizer.lr=1e-3", "sft.optimizer.lr = 0.001: has no effect"),
        ("sft.data=[x.parquet]", 'sft.data = ["x.parquet"]: has no effect'),
        ("run.seed=1", "prepare.seed = 1: prepares another task, with another tokenizer, than runs/a (sft.from)"),
        ("prepare.model.hidden_size=64", "prepare.model.hidden_size = 64: prepares another task"),
        ("run.name=a", "is this run's own directory"),
        ("sft.from=runs/c", "is no run directory (no config.yaml in it)"),
        ("sft.from=my.yaml", "is no run directory"),
    ],
)
def test_what_differs_is_named_with_both_values(folder: Path, overrides: str, problem: str) -> None:
    errors, _ = found(*overrides.split())
    assert len(errors) == 1 and problem in errors[0]


def test_another_seed_needs_the_task_of_the_other_run(folder: Path) -> None:
    assert found("run.seed=1", "prepare.seed=0") == ([], [])
    assert found("run.seed=1", "prepare.seed=0", "prepare.directory=runs/a/task") == ([], [])


def test_another_rendering_is_a_doubt(folder: Path) -> None:
    errors, (warning,) = (
        found("data.system_prompt=Think.", "data.tool_in_prompt=true")[0],
        found("data.system_prompt=Think.")[1],
    )
    assert errors == []
    assert warning.startswith('data.system_prompt = "Think.": differs from what the SFT model of runs/a')


def test_keys_that_are_not_given_are_those_of_the_other_run(folder: Path) -> None:
    text = "\n".join(line for line in CONFIG.splitlines() if not line.startswith("sft:"))
    Path("short.yaml").write_text(text)
    assert found(file="short.yaml") == ([], [])
    taken = load_config("short.yaml", ["run.name=b", "sft.from=runs/a", "sft.conversations_per_step=4"]).sft
    assert taken is not None and taken.from_ == "runs/a"
    assert (taken.steps, taken.optimizer.lr, taken.data) == (5, 2e-3, ("runs/a/task/sft.parquet",))
    errors, _ = found("sft.from=runs/none", file="short.yaml")
    assert len(errors) == 1 and "command line: sft.from" in errors[0] and "is no run directory" in errors[0]


def edit(name: str, change: Callable[[dict[str, object]], object]) -> None:
    file = Path("runs/a/sft_model", name)
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda: Path("runs/a/sft_model.json").unlink(), "has not finished its SFT (no sft_model.json)"),
        (lambda: Path("runs/a/sft_model.json").write_text("{"), "sft_model.json is damaged"),
        (lambda: Path("runs/a/sft_model/model.safetensors").unlink(), 'sft.from = "runs/a": has neither model.safe'),
        (lambda: edit("config.json", lambda c: c.update(rms_norm_eps=0.5)), "its model has rms_norm_eps 0.5"),
        (lambda: edit("config.json", lambda c: c.update(hidden_size=64)), "its model has hidden_size 64"),
        (
            lambda: Path("runs/b/task/model/tokenizer.json").write_text("{}"),
            'model.path = "runs/b/task/model": has another tokenizer.json than the model that runs/a',
        ),
    ],
)
def test_a_model_that_does_not_fit_is_refused(folder: Path, change: Callable[[], object], problem: str) -> None:
    shutil.copytree("runs/a/task", "runs/b/task")
    change()
    assert any(problem in error for error in found()[0]), found()


@pytest.mark.parametrize(
    ("sft", "problem"),
    [
        ("sft=null", "is a run without SFT (sft: null)"),
        ("sft.from=runs/z", "started from the SFT model of another run itself; give that run: sft.from=runs/z"),
        ("sft.export=false", "did not keep its SFT model"),
    ],
)
def test_a_run_that_did_no_sft_of_its_own_is_named(folder: Path, sft: str, problem: str) -> None:
    Path("runs/c").mkdir()
    Path("runs/c/config.yaml").write_text(dump(load_config("my.yaml", ["run.name=c", sft])))
    (error,) = found("sft.from=runs/c")[0]
    assert problem in error


def test_a_resume_with_a_checkpoint_needs_the_other_run_no_more(folder: Path) -> None:
    marker = Path("runs/b/checkpoints/step_000001/COMPLETE.json")
    marker.parent.mkdir(parents=True)
    marker.touch()
    shutil.rmtree("runs/a")
    assert found("run.resume=auto") == ([], [])
    assert any("is no run directory" in error for error in found()[0])


def test_a_changed_file_is_found_when_the_model_is_read(folder: Path) -> None:
    record = read_sft_record(Path("runs/a"))
    record.check_files(Path("runs/a"))
    weights = Path("runs/a/sft_model/model.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ConfigError, match=r"damaged or was changed: model\.safetensors in runs/a/sft_model"):
        record.check_files(Path("runs/a"))
