"""Weight updates of a model whose output layer is its embedding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fleet_helpers import make_config, scripted_tool
from tiny_model import build_tiny_model

from ctpo_megatron.data.records import Prompt
from ctpo_megatron.rollout import RolloutFleet, Sampling


@pytest.mark.timeout(200)
def test_an_update_reaches_a_tied_output_layer(tmp_path: Path) -> None:
    """vLLM packs the output layer on CPU; a tied one receives no weights of its own and could keep the old copy."""
    _, model = build_tiny_model(tmp_path / "model", tie_word_embeddings=True)
    config = make_config(tmp_path / "model", tmp_path)
    tool = scripted_tool(tmp_path / "flag")
    prompt = Prompt("p", "test", (), "", tuple(range(20, 60)))
    with RolloutFleet(config, str(tmp_path / "model"), 7, "unused", tool_factory=tool) as fleet:
        fleet.start()
        for version in (1, 2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.05 * torch.randn(parameter.shape))
            state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
            fleet.sync(state.items(), version)
            [group] = fleet.generate([prompt], step=version, samples=4, sampling=Sampling())
            for trajectory in group.trajectories:
                ids = torch.tensor(trajectory.token_ids)
                with torch.no_grad():
                    logp = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
                mask = torch.tensor(trajectory.model_mask[1:], dtype=torch.bool)
                found = torch.tensor(trajectory.behaviour_logp[1:])
                assert (found - logp)[mask].abs().max() <= 1e-4
