"""`ctpo doctor CONFIG`: the configuration, its tokenizer and template, and what it wants of the machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ctpo_megatron import cli
from ctpo_megatron.checks import NODE, Gpu, Wanted, diagnose_run
from ctpo_megatron.config import Job, Problem, load_with_sources, passed
from ctpo_megatron.plan import (
    DiskNeeds,
)
from ctpo_megatron.plan.host import ENGINE, RAY, SANDBOX, TRAINER
from tests.engines.tiny_model import CHATML, build_tiny_model, tiny_tokenizer

TOOLS = "{%- if tools %}{{ tools | tojson }}{%- endif %}" + CHATML
CONFIG = """\
run: {name: first, root: runs, steps: 4}
model: {path: model}
data: {train: [train.parquet], max_prompt_tokens: 64}
policy: {micro_batch_tokens: 1024}
rollout: {max_response_tokens: 176, engine: {max_model_len: 256, kv_cache_mb: 64, dtype: float32}}
checkpoint: {every: 1}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration and its model, below the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first.yaml").write_text(CONFIG)
    (tmp_path / "train.parquet").touch()
    build_tiny_model(tmp_path / "model")
    tiny_tokenizer(TOOLS).save_pretrained(tmp_path / "model")
    return tmp_path


def checked(*overrides: str, gpus: tuple[Gpu, ...] = ()) -> tuple[dict[str, Problem], Wanted]:
    config, sources = load_with_sources("first.yaml", [*overrides])
    findings, wanted = diagnose_run(config, sources, Job(1, 1, len(gpus), cuda=bool(gpus)), [*gpus])
    return {finding.key: finding for finding in findings}, wanted


def test_a_good_configuration(folder: Path) -> None:
    found, wanted = checked("sandbox.require=namespaces")
    assert found["tokenizer"].severity == "ok", found
    assert "ends with <|im_end|>; chat template: its own" in found["tokenizer"].message
    assert wanted.sandbox == "namespaces"
    disk = wanted.disk
    assert disk.folder == "runs/first" and disk.once == 3 * wanted.weight_bytes
    # Three checkpoints, the export, and less than 8 MiB of trajectories and logs.
    assert 0 < disk.whole - 3 * disk.once - wanted.weight_bytes < 8 << 20
    assert wanted.host_bytes > 2 * wanted.weight_bytes + (64 << 20)
    assert wanted.expected_bytes > wanted.host_bytes + TRAINER + ENGINE + RAY


def test_one_copy_of_the_weights_is_counted(folder: Path) -> None:
    """Bytes of host memory of two engines, and of what they fetch."""
    engines, cache = "rollout.engines=2", "rollout.engine.kv_cache_mb=64"
    _, sampled = checked(engines, cache)
    _, replayed = checked(engines, cache, "rollout.replay=recording")
    engines = 3 * sampled.weight_bytes + 2 * (64 << 20)
    assert sampled.host_bytes - replayed.host_bytes == pytest.approx(engines)
    whole = engines + 2 * ENGINE + RAY + SANDBOX
    assert sampled.expected_bytes - replayed.expected_bytes == pytest.approx(whole)


def test_every_fault_of_tokenizer_and_template_is_named(folder: Path) -> None:
    tiny_tokenizer().save_pretrained(folder / "model")
    found, _ = checked()
    assert "does not show the model its tools (code_interpreter)" in found["tokenizer"].message
    tiny_tokenizer("{{ raise_exception('no') }}").save_pretrained(folder / "model")
    assert checked()[0]["tokenizer"].severity == "error"
    tokenizer = tiny_tokenizer(TOOLS)
    tokenizer.add_tokens([f"one of many {n}" for n in range(512)])
    tokenizer.save_pretrained(folder / "model")
    found, _ = checked()
    assert found["tokenizer"].severity == "error" and "but the model's vocabulary 512" in found["tokenizer"].message
    (folder / "model" / "tokenizer.json").unlink()
    found, _ = checked()
    assert "the tokenizer cannot be read" in found["tokenizer"].message


def test_a_model_that_is_not_there_hides_nothing_else(folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    found, wanted = checked("model.path=elsewhere")
    assert found["config"].severity == "error" and "cannot read elsewhere/config.json" in found["config"].message
    assert wanted.sandbox == "landlock"
    assert wanted.disk == DiskNeeds("runs/first", 0.0, float(1 << 30))


def test_a_sandbox_elsewhere_or_of_the_node_is_not_started() -> None:
    assert checked("sandbox.url='http://10.0.0.7:8080'")[1].sandbox == ""
    assert checked("cluster.nodes=2")[1].sandbox == NODE


def test_a_gpu_that_is_too_small_is_a_problem_of_the_configuration(folder: Path) -> None:
    card = Gpu("NVIDIA T4", 1e-3, "580.1")
    found, _ = checked("rollout.engine.kv_cache_mb=null", gpus=(card, card))
    assert found["config"].severity == "error" and "GiB" in found["config"].message
    fits = Gpu("NVIDIA H100", 80.0, "580.1")
    found, _ = checked("rollout.engine.kv_cache_mb=null", gpus=(fits, fits))
    fullest = found["GPU memory"]
    assert fullest.severity == "ok" and "of 80 GiB on GPU 1, while weights are sent" in fullest.message


def test_the_exit_status_tells_ready_broken_and_wrong_request(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctpo_megatron.cli.doctor.diagnose", lambda wanted, deep: [passed("torch", "2")])
    assert cli.main(["doctor", "frist.yaml"]) == 2
    assert "did you mean first.yaml?" in capsys.readouterr().err
    (folder / "model" / "tokenizer.json").unlink()
    assert cli.main(["doctor", "first.yaml", "policy.micro_batch_tokens=9", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert not said["ready"] and said["verdict"].startswith("not ready: ")
    found = said["findings"]["Configuration first.yaml"]
    assert {each["name"] for each in found if each["status"] == "broken"} == {"config", "tokenizer"}
    assert "copy it there" in said["to_do"]
    assert cli.main(["doctor", "first.yaml"]) == 1
    out, err = capsys.readouterr()
    assert out.endswith("\n") and "not ready: " in out and "  tokenizer: " in err
