"""A CPU engine reports the experts that the model of transformers takes, also for tokens of the prefix cache."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from ctpo_megatron.config import EngineConfig
from ctpo_megatron.engines.cpu import CpuSetup
from tests.engines.pool_helpers import make_config
from tests.engines.tiny_model import build_tiny_model
from tests.support.experts import taken
from tests.support.ranks import prefork

pytestmark = pytest.mark.slow  # vLLM takes eight seconds to import

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
PROMPT, OTHER = [5 + 7 * i % 200 for i in range(70)], [9 + 11 * i % 200 for i in range(45)]


def test_choices_are_those_of_the_model(tmp_path: Path) -> None:
    done = prefork().run(play, tmp_path, deadline_s=150)
    assert done.returncode == 0, done.stderr[-4000:]


def play(root: Path) -> int:
    torch.set_num_threads(1)
    os.environ.update(CpuSetup().environment(EngineConfig()))
    asyncio.run(_play(root))
    return 0


async def _play(root: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    from ctpo_megatron.engines.cpu import gemm

    _, model = build_tiny_model(root / "model", favour={}, **EXPERTS)
    _, updated = build_tiny_model(root / "updated", seed=1, favour={}, **EXPERTS)
    config = make_config(root / "model", root, engine={"max_model_len": 320, "max_num_seqs": 16, "kv_cache_mb": 1})
    settings = AsyncEngineArgs(**CpuSetup().arguments(config, str(root / "model")))
    llm = CpuSetup().make(settings, EngineConfig(threads=1), router_choices=True)
    core: Any = llm.engine_core
    number, cached = iter(range(1000)), []

    async def generate(
        prompt: list[int], length: int, start: int = 0, stop: str = ""
    ) -> tuple[list[int], NDArray[Any], int]:
        """All tokens, the reported experts, and how many tokens were sampled before an update."""
        params = SamplingParams(
            max_tokens=length,
            seed=next(number),
            ignore_eos=True,
            stop=list(stop),
            detokenize=bool(stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
            routed_experts_prompt_start=start,
        )
        async for output in llm.generate(tokens_input(prompt), params, f"{next(number)}"):
            last = output
        cached.append(last.num_cached_tokens)
        made = last.outputs[0]
        assert made.routed_experts.dtype == np.uint8
        ids = [*prompt, *made.token_ids]
        assert made.routed_experts.shape == (len(ids) - 1 - start, 2, 2)
        return ids, np.sort(made.routed_experts, axis=2), made.weight_versions[0].end

    await llm.update_weight_version("1")
    first, experts, _ = await generate(PROMPT, 20)
    assert np.array_equal(experts, taken(model, first))
    assert cached == [0]

    # The next turn, whose beginning is in the prefix cache, from the last token of the first on.
    second, experts, _ = await generate([*first, *OTHER], 10, len(first) - 1)
    assert np.array_equal(experts, taken(model, second)[len(first) - 1 :])
    assert cached[-1] >= 64

    # Stop strings, which vLLM's frontend finds: the engine core does not know that the request has ended.
    tasks = [asyncio.create_task(generate(PROMPT, 200, i, stop=ascii_lowercase)) for i in range(4)]
    for start, (ids, experts, _) in enumerate(await asyncio.gather(*tasks)):
        assert len(PROMPT) + 1 < len(ids) < len(PROMPT) + 200
        assert np.array_equal(experts, taken(model, ids)[start:])

    # One prompt for all samples, one after another in the cache, and more requests than it can hold.
    tasks = [asyncio.create_task(generate(PROMPT if i % 2 else OTHER, 60 + i)) for i in range(24)]
    preempted = 0
    while not all(task.done() for task in tasks):
        running = list(core.core.scheduler.requests.values())
        preempted = max([preempted, *(request.num_preemptions for request in running)])
        await asyncio.sleep(0.001)
    assert preempted
    for ids, experts, _ in await asyncio.gather(*tasks):
        assert np.array_equal(experts, taken(model, ids))
    assert max(cached[-24:]) >= 64

    # Weights change: what was read before has its experts from then, the rest from the new weights, whole cache
    # included.
    tasks = [asyncio.create_task(generate(OTHER, 150)) for _ in range(3)]
    while not any(request.num_output_tokens > 30 for request in core.core.scheduler.requests.values()):
        await asyncio.sleep(0.001)
    await llm.pause_generation(mode="keep", clear_cache=True)
    await core.in_turn(lambda: _load(core.core, root / "updated", gemm.pack_again))
    await llm.update_weight_version("2")
    await llm.resume_generation()
    for ids, experts, before in await asyncio.gather(*tasks):
        read = len(OTHER) + before - 1
        assert 30 < before < 150
        assert np.array_equal(experts[:read], taken(model, ids)[:read])
        assert np.array_equal(experts[read:], taken(updated, ids)[read:])
        assert not np.array_equal(experts[:read], taken(updated, ids)[:read])
    assert not core._choices._kept and not core._choices._given


def _load(core: Any, directory: Path, pack_again: Any) -> None:
    from safetensors.torch import load_file

    weights = load_file(directory / "model.safetensors")
    core.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights.items())})
    [model] = core.collective_rpc(_model_of)
    pack_again(model)


def _model_of(worker: Any) -> Any:
    return worker.get_model()
