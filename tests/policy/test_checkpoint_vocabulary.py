"""Checkpoints between layouts that pad the vocabulary differently, and what is not a matter of padding."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from ctpo_megatron.config import PolicyConfig
from ctpo_megatron.policy import CheckpointError, Trainer, destroy_distributed, init_distributed
from tests.policy import scenario
from tests.policy.jobs import run_job

run = partial(run_job, scenario.run)
TP2 = {"tensor_model_parallel_size": 2}


def build(directory: Path, vocabulary: int) -> None:
    shape = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=vocabulary, head_dim=24, intermediate_size=192, **shape)
    Qwen3ForCausalLM(config).save_pretrained(directory)


def test_a_vocabulary_may_be_padded_differently_but_not_be_another_one(tmp_path: Path) -> None:
    build(tmp_path / "m", 600)  # 640 rows on one rank, 768 on two
    build(tmp_path / "larger", 900)
    one = run(tmp_path, 1, {"m": {"family": "m", "save": str(tmp_path / "one")}})["m"]
    from_one = {"family": "m", "load": str(tmp_path / "one" / "step_000001"), "policy": TP2}
    saved = {"family": "m", "save": str(tmp_path / "two"), "policy": TP2}
    two = run(tmp_path, 2, {"resumed": from_one, "saved": saved})
    back = {"family": "m", "load": str(tmp_path / "two" / "step_000001")}
    found = run(tmp_path, 1, {"back": back})["back"]
    for resumed in (two["resumed"], found):
        for name in ("actor/pg_loss", "actor/grad_norm"):
            assert resumed["steps"][0][name] == pytest.approx(one["steps"][1][name], rel=1e-4, abs=1e-7)
    layout = init_distributed(PolicyConfig(), seed=0)
    try:
        policy = Trainer(PolicyConfig(), layout, tmp_path / "larger", temperature=1.0)
        with pytest.raises(CheckpointError, match=r"embedding.*768x96 in the checkpoint and float32 1024x96 here"):
            policy.load_weights(tmp_path / "two" / "step_000001")
    finally:
        destroy_distributed()
