"""Weight updates of layers that vLLM packs for CPU kernels: an output layer that is the embedding, and experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ctpo_megatron.data.records import Prompt
from ctpo_megatron.rollout import RolloutFleet, Sampling
from tests.rollout.fleet_helpers import make_config, scripted_tool
from tests.rollout.tiny_model import build_tiny_model

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}


@pytest.mark.timeout(200)
@pytest.mark.parametrize("settings", [{"tie_word_embeddings": True}, EXPERTS], ids=["tied", "experts"])
def test_an_update_reaches_what_vllm_packs(settings: dict[str, Any], tmp_path: Path) -> None:
    """A tied output layer receives no weights of its own, and experts are packed only once: both could stay behind."""
    _, model = build_tiny_model(tmp_path / "model", **settings)
    config = make_config(tmp_path / "model", tmp_path)
    tool = scripted_tool(tmp_path / "flag")
    prompt = Prompt("p", "test", (), "", tuple(range(20, 60)))
    with RolloutFleet(config, str(tmp_path / "model"), 7, "unused", tool_factory=tool) as fleet:
        fleet.start()
        for version in (1, 2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.05 * torch.randn(parameter.shape))
            model.save_pretrained(tmp_path / "updated")
            fleet.sync(load_file(tmp_path / "updated" / "model.safetensors").items(), version)
            [group] = fleet.generate([prompt], step=version, samples=4, sampling=Sampling())
            for trajectory in group.trajectories:
                ids = torch.tensor(trajectory.token_ids)
                with torch.no_grad():
                    log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
                mask = torch.tensor(trajectory.response_mask[1:], dtype=torch.bool)
                found = torch.tensor(trajectory.rollout_log_probs[1:])
                assert (found - log_probs)[mask].abs().max() <= 1e-4
