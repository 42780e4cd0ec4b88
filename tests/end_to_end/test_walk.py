"""The files that a row and a weight enter in one step of the real run."""

from __future__ import annotations

import json

import pytest

from tests import structure

OF_A_ROW = {
    "answers/ctpo_answers/scoring.py",
    "ctpo_megatron/data/sampler.py",
    "ctpo_megatron/engines/engine.py",
    "ctpo_megatron/environments/episode.py",
    "ctpo_megatron/environments/toolbox.py",
    "ctpo_megatron/objective/ratios.py",
    "ctpo_megatron/policy/minibatch.py",
    "ctpo_megatron/policy/trainer.py",
    "ctpo_megatron/rewards/worker.py",
    "ctpo_megatron/rollouts/rollouts.py",
    "ctpo_megatron/run/run.py",
    "ctpo_megatron/run/ranks.py",
    "ctpo_megatron/train.py",
    "kernels/ctpo_kernels/loss_torch.py",
    "sandbox/ctpo_sandbox/client.py",
}
OF_A_WEIGHT = {
    "ctpo_megatron/engines/engine.py",
    "ctpo_megatron/engines/weights/receiver.py",
    "ctpo_megatron/policy/hf.py",
    "ctpo_megatron/policy/trainer.py",
    "ctpo_megatron/rollouts/rollouts.py",
}
OF_NEITHER = {
    "ctpo_megatron/config/load.py",
    "ctpo_megatron/policy/checkpoint.py",
    "ctpo_megatron/report/page.py",
    "ctpo_megatron/run/checkpoints.py",
    "ctpo_megatron/sft.py",
}


@pytest.mark.slow  # of its parts: tests/test_structure.py
def test_the_files_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert structure.main(["--trace", "--json"]) == 0
    walks = json.loads(capsys.readouterr().out)
    row, weights = set(walks["row"]["entered"]), set(walks["weights"]["entered"])
    assert row >= OF_A_ROW
    assert weights >= OF_A_WEIGHT
    assert not (row | weights) & OF_NEITHER
    assert all((structure.ROOT / file).exists() for file in OF_NEITHER)
    assert "ctpo_megatron/environments/episode.py" not in weights
    assert "ctpo_megatron/engines/weights/receiver.py" not in row
