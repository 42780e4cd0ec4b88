"""Checkpoints of a tiny model, and the weights after one more step: `megatron_checkpoints/` has them by both releases.

python -m tests.policy.megatron_checkpoints [FOLDER]      # those of the release of megatron-core that is installed
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ctpo_megatron.config import OptimizerConfig, PolicyConfig
from ctpo_megatron.data import Trajectory
from ctpo_megatron.policy import Layout, Trainer, destroy_distributed, init_distributed
from tests.policy import models
from tests.policy.stepping import LOSS, weights

VERSION = version("megatron-core")
FOLDER = Path(__file__).with_suffix("")
KINDS: dict[str, dict[str, object]] = {
    "plain": {},
    "distributed": {"use_distributed_optimizer": True},
    "bfloat16": {"use_distributed_optimizer": True, "dtype": "bfloat16"},
}
VOCAB = 32
AFTER = "after.safetensors"
LR = 1e-2


def build(folder: Path) -> Path:
    """A model of about 4,000 parameters."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    shape = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 64}
    models.build("qwen3-tied", folder, layers=1, **heads, **shape)
    return folder


def make(layout: Layout, model: Path, kind: str) -> Trainer:
    policy = Trainer(PolicyConfig(micro_batch_tokens=64, **KINDS[kind]), layout, model, temperature=1.0)
    policy.use_optimizer(OptimizerConfig(lr=LR, schedule="constant"), total_steps=4)
    return policy


def step(policy: Trainer, seed: int) -> None:
    rng = random.Random(seed)
    trajectories = []
    for index in range(4):
        trajectory = Trajectory("p", index, seed=index)
        trajectory.append_context([rng.randrange(VOCAB) for _ in range(4)], turn=0)
        trajectory.append_model([rng.randrange(VOCAB) for _ in range(8)], [-3.5] * 8, [0] * 8, 1)
        trajectories.append(trajectory)
    (mini_batch,) = policy.distribute(trajectories, [-1.0, 0.5, 1.0, -0.5], size=4)
    policy.compute_old_log_probs([mini_batch])
    policy.update(mini_batch, LOSS)


def write(layout: Layout, folder: Path) -> list[Path]:
    """One archive a kind: a checkpoint after two steps, and the weights after a third."""
    archives = []
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as place:
            content = Path(place, "content")
            policy = make(layout, build(Path(place, "model")), kind)
            step(policy, seed=1)
            step(policy, seed=2)
            policy.save(content, 2, {"step": 2})
            step(policy, seed=3)
            save_file(weights(policy), content / AFTER)
            name = folder / f"{VERSION}-{kind}"
            archives.append(Path(shutil.make_archive(str(name), "zip", content)))
    return archives


def resume(layout: Layout, archive: Path, place: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights after the step that follows a checkpoint, made here, and as the archive has them."""
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(place / "content")
    policy = make(layout, build(place / "model"), archive.stem.rpartition("-")[2])
    assert policy.load(place / "content" / "step_000002") == {"step": 2}
    step(policy, seed=3)
    return weights(policy), load_file(place / "content" / AFTER)


if __name__ == "__main__":
    for file in write(init_distributed(PolicyConfig(), seed=0), Path(sys.argv[1]) if sys.argv[1:] else FOLDER):
        print(file, file.stat().st_size, "bytes")
    destroy_distributed()
