"""What recorded experts do to the difference of sampler and trainer, on a CPU: dense, and experts without and with.

    PYTHONPATH=.:kernels python -m benchmarks.router_replay [--conversations 32] [--tokens 200] [--cases N ...]

Random models of four layers of equal width: one dense, one with 4 of 16 experts a token. vLLM samples, and the trainer
computes the log-probs of the same tokens in float32. The sampler computes in bfloat16, or in float32 with routers that
are perturbed: normal noise, a share of the standard deviation of their weights. Each side is a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks.kernels import report
from ctpo_megatron.config import EngineConfig, PolicyConfig
from ctpo_megatron.config.schema import Config
from ctpo_megatron.data import Trajectory
from ctpo_megatron.data.tokens import ROUTER_CHOICES
from ctpo_megatron.engines.cpu import CpuSetup

CASES = (
    ("dense, sampler in bfloat16", False, "bfloat16", 0.0),
    ("experts, sampler in bfloat16", True, "bfloat16", 0.0),
    ("dense, sampler in float32", False, "float32", 0.0),
    ("experts, sampler in float32", True, "float32", 0.0),
    ("experts, routers perturbed by 0.1 %", True, "float32", 0.001),
    ("experts, routers perturbed by 1 %", True, "float32", 0.01),
)
"""Name, whether with experts, the sampler's precision, and its routers' perturbation."""
METRICS = ("log_prob_abs_mean", "log_prob_abs_max", "router_agreement")
_VOCABULARY, _PROMPT, _DEADLINE_S = 512, 40, 600.0


def make_model(path: Path, *, experts: bool, perturbation: float = 0.0) -> None:
    """A random model; the same but for the perturbation of its routers."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    common = {**sizes, "head_dim": 32, "intermediate_size": 256, "vocab_size": _VOCABULARY, "initializer_range": 0.08}
    if not experts:
        Qwen3ForCausalLM(Qwen3Config(**common)).save_pretrained(path)
        return
    mixture = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "norm_topk_prob": True}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **mixture))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight += perturbation * layer.mlp.gate.weight.std() * torch.randn(16, 128)
    model.save_pretrained(path)


def sample(path: Path, dtype: str, experts: bool, count: int, tokens: int) -> None:
    """Write trajectories of one turn to `path / "sampled"`; in a process of its own."""
    os.environ.update(CpuSetup().environment(EngineConfig()))
    torch.set_num_threads(1)
    trajectories = asyncio.run(_sample(path, dtype, experts, count, tokens))
    (path / "sampled").write_bytes(pickle.dumps(trajectories))
    os._exit(0)  # vLLM's engine needs no end of its own


async def _sample(path: Path, dtype: str, experts: bool, count: int, tokens: int) -> list[Trajectory]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    engine = {"max_model_len": _PROMPT + tokens, "kv_cache_mb": 64, "max_num_seqs": 32, "dtype": dtype}
    config = Config.model_validate(
        {
            "run": {"name": "benchmark", "steps": 1},
            "model": {"path": str(path)},
            "data": {"train": ["none"]},
            "rollout": {"engine": engine},
        }
    )
    arguments = CpuSetup().arguments(config, str(path)) | {"skip_tokenizer_init": True}
    llm = CpuSetup().make(AsyncEngineArgs(**arguments), EngineConfig(threads=1), router_choices=experts)
    await llm.update_weight_version("1")

    async def one(number: int) -> Trajectory:
        prompt = Random(number // 4).choices(range(_VOCABULARY), k=_PROMPT)
        params = SamplingParams(
            max_tokens=tokens,
            seed=number,
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        async for output in llm.generate(tokens_input(prompt), params, f"{number}"):
            made: Any = output.outputs[0]
        trajectory = Trajectory(f"p{number // 4}", number % 4, seed=number)
        trajectory.append_context(prompt, 0)
        trajectory.append_model(list(made.token_ids), list(made.logprobs.logprobs), [1] * tokens, 1)
        if experts:
            trajectory.fill(0, {ROUTER_CHOICES: made.routed_experts})
        return trajectory

    return list(await asyncio.gather(*map(one, range(count))))


def compare(path: Path, sampled: Path, replay: bool) -> None:
    """Write `mismatch/*` of trajectories under a model to `sampled` + `.json`; in a process of its own."""
    from ctpo_megatron.policy import Trainer, destroy_distributed, init_distributed

    trajectories = pickle.loads(sampled.read_bytes())
    config = PolicyConfig(router_replay=replay)
    trainer = Trainer(config, init_distributed(config, seed=0), path, temperature=1.0)
    (mini_batch,) = trainer.distribute(trajectories, None, len(trajectories))
    found = trainer.compute_old_log_probs([mini_batch])
    destroy_distributed()
    sampled.with_suffix(".json").write_text(json.dumps(found))


def in_a_process(function: Callable[..., None], *arguments: Any) -> None:
    """Raises RuntimeError when it fails or takes longer than ten minutes."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    process.start()
    process.join(_DEADLINE_S)
    if process.exitcode != 0:
        process.kill()
        raise RuntimeError(f"{function.__name__}{arguments} ended with {process.exitcode} (None: not within its time)")


def measure(
    folder: Path, *, experts: bool, dtype: str, perturbation: float, count: int, tokens: int
) -> list[dict[str, float]]:
    """`mismatch/*` without replay and, of experts, with."""
    trainer, sampler = folder / "trainer", folder / "sampler"
    make_model(trainer, experts=experts)
    make_model(sampler, experts=experts, perturbation=perturbation)
    in_a_process(sample, sampler, dtype, experts, count, tokens)
    found = []
    for replay in (False, True) if experts else (False,):
        in_a_process(compare, trainer, sampler / "sampled", replay)
        found.append(json.loads((sampler / "sampled.json").read_text(encoding="utf-8")))
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--cases", type=int, nargs="+", default=range(len(CASES)), help="numbers, from 0")
    options = parser.parse_args()
    rows = []
    for name, experts, dtype, perturbation in (CASES[number] for number in options.cases):
        with tempfile.TemporaryDirectory() as folder:
            size = {"count": options.conversations, "tokens": options.tokens}
            found = measure(Path(folder), experts=experts, dtype=dtype, perturbation=perturbation, **size)
        for replay, metrics in zip(("off", "on"), found, strict=False):
            known = {each: metrics.get(f"mismatch/{each}") for each in METRICS}
            figures = ["" if value is None else f"{value:.3g}" for value in known.values()]
            rows.append([name, replay if experts else "", *figures])
    print(report.markdown(("models", "replay", *METRICS), rows))


if __name__ == "__main__":
    main()
