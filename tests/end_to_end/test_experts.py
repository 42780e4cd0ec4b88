"""Whole runs of a mixture of experts: every token is trained with the experts that it was sampled with."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.end_to_end.small_run import TASK, Ctpo, records, repeatable

AGREEMENT, UNRECORDED = "mismatch/router_agreement", "mismatch/router_unrecorded"

pytestmark = pytest.mark.slow  # runs with engines, one after another


@pytest.fixture(scope="module")
def mixture(ctpo: Ctpo) -> Path:
    """A random mixture with the tokenizer and the sizes of the quickstart's model."""
    dense, folder = TASK / "model", ctpo.directory / "mixture"
    shutil.copytree(dense, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    sizes = {k: v for k, v in AutoConfig.from_pretrained(dense).to_dict().items() if k not in ("model_type", "dtype")}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes | experts | {"architectures": None})).save_pretrained(folder)
    return folder


def train(ctpo: Ctpo, mixture: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    """The metrics of its RL steps."""
    done = ctpo.train(f"run.name={name}", f"model.path={mixture}", "policy.router_replay=true", *overrides)
    assert done.returncode == 0, done.stderr[-4000:]
    return records(ctpo.directory / "runs" / name)[1:]


def test_a_run_and_its_replay_train_with_the_experts_of_the_sampler(ctpo: Ctpo, mixture: Path) -> None:
    steps = train(ctpo, mixture, "experts")
    assert len(steps) == 3
    for step in steps:
        assert step[UNRECORDED] == 0 and step[AGREEMENT] > 0.999
        assert step["mismatch/log_prob_abs_max"] < 1e-4
    again = train(ctpo, mixture, "experts-again", "rollout.replay=runs/experts", "eval.every=0")
    live = [{k: v for k, v in repeatable(step).items() if not k.startswith("val/")} for step in steps]
    assert [repeatable(step) for step in again] == live and all(AGREEMENT in step for step in again)


def test_trajectories_that_go_over_updates_keep_their_experts(ctpo: Ctpo, mixture: Path) -> None:
    stale = ("rollout.max_staleness=1", "objective.anchor=behaviour", "policy.optimizer.lr=1e-3", "run.steps=4")
    steps = train(ctpo, mixture, "experts-ahead", *stale)
    assert max(step["rollout/staleness_max"] for step in steps) == 1
    for step in steps:
        assert step[UNRECORDED] == 0 and step[AGREEMENT] > 0.5
