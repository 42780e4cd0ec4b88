"""What is evaluated: the model that a path means, whose configuration it takes, what makes an evaluation another."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ctpo_megatron.base.exports import record_step
from ctpo_megatron.config import Config, ConfigError, dump
from ctpo_megatron.data.records import Prompt
from ctpo_megatron.evaluate import Target, find_target, read_config
from ctpo_megatron.evaluate.target import fingerprint, settings_of
from tests.tracking.synthetic_run import make_config


def model(path: Path, content: str = "{}", step: int | None = None) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(content)
    (path / "model.safetensors").write_bytes(bytes(range(256)) * 2048)
    if step is not None:
        record_step(path, step)
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory without a model."""
    settings = {
        "rollout": {"max_turns": 7, "engines": 3, "replay": "runs/other", "mismatch_limit": 0.1},
        "eval": {"samples": 8, "temperature": 0.7, "prompts": 5},
        "policy": {"tensor_model_parallel_size": 8},
        "placement": {"mode": "colocated"},
        "cluster": {"nodes": 2},
    }
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.yaml").write_text(dump(make_config(tmp_path, **settings)))
    return path


def test_a_run_stands_for_its_export_of_the_highest_step(run: Path) -> None:
    """Whenever they were written."""
    with pytest.raises(ConfigError, match=f"type `ctpo export {run}`"):
        find_target(run, None)
    older = model(run / "model-step_000008")
    assert find_target(run, None) == Target(older, run / "config.yaml", 8, "step 8, its only export")
    newest = model(run / "model", step=24)
    model(run / "model-step_000016", step=16)
    highest = Target(newest, run / "config.yaml", 24, "step 24, the highest of its exports")
    assert find_target(run, None) == highest
    checkpoint = run / "checkpoints" / "step_000024"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE.json").touch()
    assert find_target(run, None) == highest
    checkpoint.rename(checkpoint.with_name("step_000025"))
    told = rf"step 25 is newer than every export; {newest} is of step 24; type `ctpo export {run}`, or name a model"
    with pytest.raises(ConfigError, match=told):
        find_target(run, None)
    assert find_target(older, None) == Target(older, run / "config.yaml")  # a model in a run keeps its configuration


def test_a_model_alone_has_no_configuration_unless_one_is_given(tmp_path: Path) -> None:
    alone = model(tmp_path / "hub" / "Qwen")
    assert find_target(alone, None) == Target(alone, None)
    assert find_target(alone, Path("mine.yaml")) == Target(alone, Path("mine.yaml"))
    with pytest.raises(ConfigError, match="is no model and no run"):
        find_target(tmp_path / "hub", None)


def test_the_run_says_how_it_is_asked_and_nothing_of_its_training(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    target = find_target(model(run / "model"), None)
    config, _ = read_config(target, ["rollout.max_turn_tokens=9", "run.seed=4"], 0)
    assert config.model.path == str(run / "model")
    assert (config.rollout.max_turns, config.rollout.max_turn_tokens, config.run.seed) == (7, 9, 4)
    assert (config.eval.samples, config.eval.temperature, config.eval.prompts) == (8, 0.7, None)
    assert (config.rollout.engines, config.rollout.replay, config.rollout.mismatch_limit) == (1, None, None)
    assert config.policy.tensor_model_parallel_size == 1 and config.placement.mode == "disaggregated"
    assert config.cluster.nodes == 1
    eight, _ = read_config(target, ["rollout.engine.tensor_parallel_size=2"], 8)
    assert eight.rollout.engines == 4
    assert read_config(target, ["rollout.engines=5"], 8)[0].rollout.engines == 5
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    joined, _ = read_config(target, [], 8)
    assert (joined.cluster.nodes, joined.rollout.engines) == (2, 16)


def test_users_parts_are_the_runs_copies_or_those_that_are_here(run: Path, tmp_path: Path) -> None:
    target = find_target(model(run / "model"), None)
    text = (run / "config.yaml").read_text()
    text = text.replace("extensions:\n  path: null", f"extensions:\n  path: [/gone, {run}]")
    (run / "config.yaml").write_text(text)
    assert read_config(target, [], 0)[0].extensions.path == (str(run),)
    (run / "extensions").mkdir()
    assert read_config(target, [], 0)[0].extensions.path == (str(run / "extensions"),)
    assert read_config(target, [f"extensions.path=[{tmp_path}]"], 0)[0].extensions.path == (str(tmp_path),)


def test_a_model_alone_takes_the_defaults(tmp_path: Path) -> None:
    config, _ = read_config(Target(model(tmp_path / "m"), None), ['data.eval=["x.parquet"]'], 0)
    assert config.data.eval == ("x.parquet",) and config.rollout.max_turns == 5
    with pytest.raises(ConfigError, match="unknown key"):
        read_config(Target(tmp_path / "m", None), ["eval.nothing=1"], 0)


def test_a_fingerprint_goes_with_the_content_wherever_it_lies(tmp_path: Path) -> None:
    first = model(tmp_path / "a")
    assert fingerprint(shutil.copytree(first, tmp_path / "b")) == fingerprint(first)
    (first / "notes.txt").write_text("x")
    assert fingerprint(first) == fingerprint(tmp_path / "b")
    weights = bytearray((first / "model.safetensors").read_bytes())
    weights[300_000] ^= 1
    (first / "model.safetensors").write_bytes(weights)
    assert fingerprint(first) != fingerprint(tmp_path / "b")
    assert fingerprint(model(tmp_path / "c", content='{"x": 1}')) != fingerprint(tmp_path / "b")


def test_everything_that_decides_a_sample_is_among_the_settings(run: Path, tmp_path: Path) -> None:
    target, prompts = find_target(model(run / "model"), None), [Prompt("p", "a", (), "7", (1, 2))]

    def settings(*overrides: str) -> dict[str, object]:
        config, _ = read_config(target, overrides, 0)
        return dict(settings_of(config, prompts))

    base = settings()
    for override in (
        "eval.temperature=0.5",
        "eval.top_p=0.9",
        "run.seed=9",
        "rollout.max_turns=3",
        "sandbox.memory_mb=99",
    ):
        assert settings(override) != base, override
    for override in ("eval.samples=64", "rollout.engines=4", "rollout.engine.max_num_seqs=3", "reward.workers=4"):
        assert settings(override) == base, override
    config: Config = read_config(target, [], 0)[0]
    assert settings_of(config, [*prompts, Prompt("q", "a", (), "8", (1,))]) != base
