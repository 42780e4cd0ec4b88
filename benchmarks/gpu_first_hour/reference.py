"""What the stages of engines share: the quickstart's task, and a model in float32 that tells what an engine should say.

Importing this loads neither Ray nor Megatron: the first stages run where these are not there yet.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.gpu_first_hour.overrides import on_device
from ctpo_megatron.config import Config, load_config
from ctpo_megatron.data import Prompt, PromptRules, Trajectory, read_prompts
from ctpo_megatron.engines.weights import Manifest
from examples.toolmath import Task, write_task

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, SAMPLES = 32, 8
THIN = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 1024,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""Of a model for a CPU."""


def quickstart(folder: Path, device: str, model: Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The quickstart's configuration with a task made in `folder`, and one turn a trajectory, which calls no tool.

    model: instead of the task's, which has random weights.
    """
    task = folder / "toolmath"
    sizes = {"train_prompts": 64, "heldout_prompts": 28, "sft_conversations": 400, "tokenizer_conversations": 400}
    write_task(Task(**sizes), task)
    settings = [f"run.root={folder}", "rollout.max_turns=1", f"model.path={model or task / 'model'}"]
    settings += [f"data.train=[{task / 'train.parquet'}]", f"data.eval=[{task / 'heldout.parquet'}]"]
    return load_config(ROOT / "configs" / "quickstart.yaml", [*settings, *on_device(device), *overrides])


def prompts_of(config: Config) -> list[Prompt]:
    """The first prompts of the task."""
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    prompts = read_prompts(config.data.train_files, tokenizer, PromptRules(config.data.max_prompt_tokens))
    prompts.problems.raise_if_any()
    return list(prompts.prompts[:PROMPTS])


def truth(config: Config) -> PreTrainedModel:
    """The model by transformers, in float32 on the CPU."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
    return model.eval()


@torch.no_grad()
def move(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """Change the weights by far more than any rounding, always alike; returns them as a checkpoint names them."""
    generator = torch.Generator().manual_seed(1)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    for parameter in model.parameters():
        parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return [(name, parameter.detach()) for name, parameter in model.named_parameters() if name not in tied]


@torch.no_grad()
def accuracy(model: PreTrainedModel, trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """Largest and mean |sampler's log-prob - model's| of the sampled tokens, in nats."""
    errors = []
    for trajectory in trajectories:
        ids = torch.tensor(trajectory.token_ids)
        log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        sampled = torch.tensor(trajectory.response_mask[1:], dtype=torch.bool)
        errors.append((log_probs - torch.tensor(trajectory.rollout_log_probs[1:]))[sampled].abs())
    every = torch.cat(errors)
    return {f"log_prob_abs_max_{version}": float(every.max()), f"log_prob_abs_mean_{version}": float(every.mean())}


def sampled_tokens(trajectories: Sequence[Trajectory]) -> int:
    """Tokens that the model sampled."""
    return sum(sum(trajectory.response_mask) for trajectory in trajectories)


class OneRank:
    """A job of one rank, as a transport sees its `Layout`, whose weights are these, on `device` and in `dtype`."""

    rank, pp_rank, is_rank_zero = 0, 0, True

    def __init__(self, tensors: Sequence[tuple[str, torch.Tensor]], device: str, dtype: torch.dtype) -> None:
        self.tensors = {name: tensor.to(device, dtype) for name, tensor in tensors}

    def on_rank_zero(self, action: Callable[[], Any]) -> Any:
        return action()

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def manifest(self) -> Manifest:
        return Manifest((name, tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors.items())


def write_model(shapes: Path, folder: Path, device: str) -> None:
    """A model of these shapes with random weights: in bfloat16 on a GPU, thin and in float32 on a CPU."""
    shape: dict[str, Any] = json.loads(shapes.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape | (THIN if device == "cpu" else {})))
    with torch.device(device):
        torch.manual_seed(0)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    model.save_pretrained(folder)
