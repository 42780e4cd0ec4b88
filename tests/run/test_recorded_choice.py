"""What `auto` of the policy was is recorded, and kept by a resume; config.yaml keeps `auto`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from ctpo_megatron.base.stop import NeverStop
from ctpo_megatron.config import Config, ConfigError
from ctpo_megatron.policy import Layout
from ctpo_megatron.run import TrainerGroup, former_choice, open_run_directory, take_over
from tests.run.scripted_run import ONE_RANK, ScriptedRuns
from tests.support.prefork import ROOT
from tests.tracking.synthetic_run import make_config

pytestmark = pytest.mark.usefixtures("one_rank")
SHAPES = ROOT / "configs" / "models" / "qwen3_0_6b.json"


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Layout, "gather", lambda _, value: [value])


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Open the directory of a run on a GPU of so many GiB."""
    model = tmp_path / "model"
    model.mkdir()
    shutil.copyfile(SHAPES, model / "config.json")

    def start(gpu_gib: float, **run: Any) -> Config:
        policy = {"dtype": "bfloat16", "use_distributed_optimizer": True, "offload": "all", "mini_batch_prompts": 16}
        config = make_config(
            tmp_path / "runs",
            run=run,
            model={"path": str(model)},
            policy=policy,
            rollout={"engine": {"max_model_len": 9216}},
            placement={"mode": "colocated", "trainer_gpus": 1, "engine_gpus": 1},
        )
        monkeypatch.setattr("ctpo_megatron.run.ranks.gpu_bytes", lambda: int(gpu_gib * 2**30))
        chosen = TrainerGroup(config, ONE_RANK, NeverStop()).settle(former_choice(config.run))
        open_run_directory(chosen)
        if config.run.resume:
            take_over(chosen)
        return chosen

    return start


def recorded(config: Config) -> tuple[Any, Any]:
    """Of environment.json, and the keys of config.yaml."""
    environment = json.loads((config.run.directory / "environment.json").read_text())
    policy = yaml.safe_load((config.run.directory / "config.yaml").read_text())["policy"]
    return environment["chosen"], (policy["micro_batch_tokens"], policy["recompute"])


def test_a_resume_keeps_what_was_chosen(started: Any) -> None:
    begun = started(48)
    chosen, given = recorded(begun)
    assert chosen["micro_batch_tokens"] > 8192 and chosen["recompute"] == "none" and chosen["gpu_gib"] == 48
    assert given == ("auto", "auto")
    assert begun.policy.chosen == tuple(chosen.values())
    resumed = started(141, resume=True)
    assert resumed.policy.chosen == begun.policy.chosen
    assert recorded(resumed) == (chosen, given)
    other = started(141, name="another")
    assert other.policy.chosen.micro_batch_tokens > chosen["micro_batch_tokens"]


def test_a_resume_says_that_what_was_chosen_does_not_fit(started: Any) -> None:
    tokens = started(48).policy.chosen.micro_batch_tokens
    with pytest.raises(ConfigError) as refused:
        started(24, resume=True)
    (problem,) = refused.value.problems
    before = f"was {tokens:,} with recompute: none when the run was begun on GPUs of 48 GiB; that takes "
    assert str(problem).startswith(f'policy.micro_batch_tokens = "auto": {before}')
    assert "of the 24.0 GiB of these GPUs 21.6 GiB can be used; resume on larger GPUs, or type " in str(problem)
    assert "policy.micro_batch_tokens=" in problem.fix and "policy.recompute=full" in problem.fix


def test_nothing_fits(started: Any) -> None:
    with pytest.raises(ConfigError, match=r"placement\.mode = \"colocated\": GPU 0: .* of 12 GiB"):
        started(12)


def test_a_run_on_a_cpu_records_the_usual_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = ScriptedRuns(tmp_path / "runs", ROOT / "configs" / "models", monkeypatch)
    config = runs.config("cpu")
    assert TrainerGroup(config, ONE_RANK, NeverStop()).settle(None).policy.chosen == (8192, "none", None)
    open_run_directory(config)
    assert recorded(config) == ({"micro_batch_tokens": 8192, "recompute": "none", "gpu_gib": None}, ("auto", "auto"))
