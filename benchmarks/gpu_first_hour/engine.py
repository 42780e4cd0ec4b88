"""One engine under one of vLLM's model runners: does it take weights, and are its log-probs those of the model?

A tiny model in the run's dtype; the truth is transformers in float32 on the CPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from ctpo_megatron.base.tensor_rows import TensorRows
from ctpo_megatron.config import Config, load_config
from ctpo_megatron.data import Group, PromptRules, prepare, read_prompts
from ctpo_megatron.engines import EnginePool, Sampling
from ctpo_megatron.engines.weights import EngineFacts, TransportSettings, WeightOffer, open_transport
from ctpo_megatron.rollouts import Request, Scheduler, ticks

ROOT = Path(__file__).resolve().parents[2]
PROMPTS, SAMPLES = 32, 8


def main() -> None:
    """Write the figures as JSON to `--out`; raises if the engine does not hold what it was sent."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_first_hour.engine", description=__doc__)
    parser.add_argument("--runner", choices=["v1", "v2"], required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(_config(Path(folder), options.device, options.runner))
    options.out.write_text(json.dumps({"runner": options.runner} | figures) + "\n")


def measure(config: Config) -> dict[str, float]:
    """Seconds to start, to sync and to sample; and |log-prob difference| (nats) before and after the sync."""
    assert config.prepare is not None
    prepare(config.prepare)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).eval()
    found = read_prompts(config.data.train_files, tokenizer, PromptRules(config.data.max_prompt_tokens))
    found.problems.raise_if_any()
    prompts = found.prompts[:PROMPTS]
    figures: dict[str, float] = {}
    fleet = EnginePool(config, "unused")  # one turn: no tool is called
    clock = time.perf_counter()
    fleet.start()
    try:
        facts = fleet.wait_ready()
        figures["start_s"] = time.perf_counter() - clock
        for version in (0, 1):
            if version:
                clock = time.perf_counter()
                fleet.send(_Sender(model, facts, config), version)
                fleet.finish_update()
                figures["sync_s"] = time.perf_counter() - clock
            clock = time.perf_counter()
            answered = ticks(Scheduler.of(fleet), prompts, Request(version, SAMPLES, Sampling()), threading.Event())
            groups = [group for answers in answered for _, group in answers.groups]
            seconds = time.perf_counter() - clock
            errors, sampled = _errors(model, groups), _model_tokens(groups)
            figures[f"tokens_per_s_{version}"] = sampled / seconds
            figures[f"log_prob_abs_max_{version}"] = float(errors.max())
            figures[f"log_prob_abs_mean_{version}"] = float(errors.mean())
    finally:
        fleet.close()
    return figures


class _Sender:
    """A trainer of one rank with a changed model, which goes by the transport of these engines."""

    rank, is_rank_zero = 0, True

    def __init__(self, model: Any, facts: EngineFacts, config: Config) -> None:
        self._tensors = dict(_moved(model))
        self._transport = open_transport(self, facts, TransportSettings.of(config.rollout.weights))

    def on_rank_zero(self, action: Callable[[], Any]) -> Any:
        return action()

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._tensors.items()

    def own_weights(self) -> Iterator[tuple[TensorRows, torch.Tensor]]:
        yield from zip(self.own_weight_rows(), self._tensors.values(), strict=True)

    def own_weight_rows(self) -> list[TensorRows]:
        return [TensorRows.whole(*shape) for shape in self.weight_shapes()]

    def weight_shapes(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        return [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors.items()]

    def offer(self, version: int) -> WeightOffer:
        self._offer = self._transport.offer(self, version)
        return self._offer

    def transfer(self) -> None:
        self._offer.transfer()


def _config(folder: Path, device: str, runner: str) -> Config:
    overrides = [f"run.root={folder}", "rollout.max_turns=1", f"rollout.engine.model_runner={runner}"]
    overrides += ["prepare.train_prompts=64", "prepare.heldout_prompts=28", "prepare.sft_conversations=400"]
    overrides += ["prepare.tokenizer_conversations=400"]
    if device == "cuda":
        overrides += ["rollout.engine.dtype=bfloat16", "rollout.engine.gpu_memory_utilization=0.5"]
        overrides += ["rollout.engine.kv_cache_mb=null"]
    return load_config(ROOT / "configs" / "quickstart.yaml", overrides)


def _moved(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's weights after a step far larger than any rounding, as a checkpoint names them."""
    generator = torch.Generator().manual_seed(1)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
            if name not in tied:
                yield name, parameter.detach()


def _errors(model: PreTrainedModel, groups: Sequence[Group]) -> torch.Tensor:
    """|sampler's log-prob - model's| of every sampled token."""
    errors = []
    for trajectory in (t for group in groups for t in group.trajectories):
        ids = torch.tensor(trajectory.token_ids)
        with torch.no_grad():
            log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        sampled = torch.tensor(trajectory.response_mask[1:], dtype=torch.bool)
        errors.append((log_probs - torch.tensor(trajectory.rollout_log_probs[1:]))[sampled].abs())
    return torch.cat(errors)


def _model_tokens(groups: Sequence[Group]) -> int:
    return sum(sum(trajectory.response_mask) for group in groups for trajectory in group.trajectories)


if __name__ == "__main__":
    main()
