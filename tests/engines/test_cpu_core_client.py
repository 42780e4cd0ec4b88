"""The engine core inside the process that uses it: requests wait while it is paused, and all fail once a step has."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ctpo_megatron.config import EngineConfig
from ctpo_megatron.config.rollout_schema import COLDEST, HOTTEST
from ctpo_megatron.engines.cpu import CpuSetup
from tests.engines.pool_helpers import make_config
from tests.engines.tiny_model import build_tiny_model
from tests.support.ranks import prefork

pytestmark = pytest.mark.slow  # vLLM takes eight seconds to import


def patched_engine(arguments: Any) -> Any:
    """As `RolloutEngine` makes it on a CPU, with one thread for the model."""
    return CpuSetup().make(arguments, EngineConfig(threads=1))


def test_requests_of_an_engine_in_this_process(tmp_path: Path) -> None:
    build_tiny_model(tmp_path / "model", favour={})
    done = prefork().run(play, tmp_path, deadline_s=120)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "RuntimeError: the step failed" in done.stdout + done.stderr


def test_temperatures_of_the_schema_are_those_that_vllm_samples_at(tmp_path: Path) -> None:
    done = prefork().run(try_temperatures, tmp_path, deadline_s=120)
    assert done.returncode == 0, done.stderr[-4000:]


def try_temperatures(_: Path) -> int:
    os.environ.update(CpuSetup().environment(EngineConfig()))
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams

    assert [SamplingParams(temperature=each).temperature for each in (COLDEST, HOTTEST)] == [COLDEST, HOTTEST]
    assert SamplingParams(temperature=COLDEST / 2).temperature == COLDEST
    with pytest.raises(VLLMValidationError, match="temperature"):
        SamplingParams(temperature=HOTTEST * 1.01)
    return 0


def test_memory_does_not_grow_with_the_numbers_of_tokens_that_were_in_a_step(tmp_path: Path) -> None:
    build_tiny_model(tmp_path / "model", favour={})
    done = prefork().run(take_steps_of_many_sizes, tmp_path, deadline_s=200)
    assert done.returncode == 0, done.stderr[-4000:]


def take_steps_of_many_sizes(root: Path) -> int:
    torch.set_num_threads(1)
    os.environ.update(CpuSetup().environment(EngineConfig()))
    asyncio.run(_take_steps(root))
    return 0


async def _take_steps(root: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.inputs import tokens_input
    from vllm.sampling_params import SamplingParams

    from ctpo_megatron.engines.cpu import core_client

    path, draw = root / "model", random.Random(0)
    settings = AsyncEngineArgs(**CpuSetup().arguments(make_config(path, root), str(path)))
    llm = core_client.in_process_engine(settings, threads=1)  # not patched: every number of tokens is compiled

    async def generate(name: str) -> None:
        prompt, length = draw.choices(range(5, 50), k=draw.randrange(1, 120)), draw.randrange(1, 40)
        async for _ in llm.generate(tokens_input(prompt), SamplingParams(max_tokens=length, ignore_eos=True), name):
            pass

    sizes = []
    for number in range(150):
        await asyncio.gather(*(generate(f"{number}.{each}") for each in range(draw.randrange(1, 33))))
        if number in (89, 149):  # of the first thirds the heap keeps some, too
            sizes.append(psutil.Process().memory_info().rss / 2**20)
    llm.shutdown()
    assert sizes[1] - sizes[0] < 25, sizes


def test_small_products_are_padded_to_few_numbers_of_tokens_with_the_same_bits(tmp_path: Path) -> None:
    build_tiny_model(tmp_path / "model", favour={})
    done = prefork().run(multiply, tmp_path, deadline_s=120)
    assert done.returncode == 0, done.stderr[-4000:]


def multiply(root: Path) -> int:
    torch.set_num_threads(1)
    os.environ.update(CpuSetup().environment(EngineConfig()))
    asyncio.run(_multiply(root))
    return 0


async def _multiply(root: Path) -> None:
    from vllm import _custom_ops
    from vllm.engine.arg_utils import AsyncEngineArgs

    path, of_vllm, multiplied = root / "model", _custom_ops.onednn_mm, set()

    def onednn_mm(handler: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        multiplied.add(len(x))
        return of_vllm(handler, x, bias)

    _custom_ops.onednn_mm = onednn_mm
    llm = patched_engine(AsyncEngineArgs(**CpuSetup().arguments(make_config(path, root), str(path))))
    core: Any = llm.engine_core
    model = core.core.model_executor.driver_worker.worker.get_model()
    layers = [layer for layer in model.modules() if hasattr(layer, "cpu_linear")]
    assert len(layers) >= 9  # four in each of two, and the head
    for layer in layers:
        width = layer.embedding_dim if hasattr(layer, "embedding_dim") else layer.input_size
        tokens = torch.randn(70, width)
        whole = layer.cpu_linear(tokens, layer.weight, None)
        multiplied.clear()
        for count in range(1, 70):
            found = layer.cpu_linear(tokens[:count], layer.weight, None)
            assert torch.equal(found, whole[:count]), (layer, count)
        assert multiplied == {8, 16, 24, 32, 40, 48, 56, 64, 80}
    llm.shutdown()


def play(root: Path) -> int:
    torch.set_num_threads(2)
    os.environ.update(CpuSetup().environment(EngineConfig()))
    asyncio.run(_play(root))
    return 0


async def _play(root: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine.exceptions import EngineDeadError

    from ctpo_megatron.engines.cpu import core_client

    path = root / "model"
    llm = patched_engine(AsyncEngineArgs(**CpuSetup().arguments(make_config(path, root), str(path))))
    assert torch.get_num_threads() == 1
    core: Any = llm.engine_core
    assert isinstance(core, core_client.InProcessCore)

    async def generate(number: int) -> list[int]:
        params = SamplingParams(max_tokens=20, seed=number, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY)
        outputs = [output async for output in llm.generate(tokens_input([9, 8, 7]), params, f"{number}")]
        return list(outputs[-1].outputs[0].token_ids)

    alone = [await generate(number) for number in (1, 2)]
    together = await asyncio.gather(*map(generate, (3, 1, 2)))
    assert together[1:] == alone and len(together[0]) == 20

    await llm.pause_generation(mode="keep", clear_cache=True)
    waiting = asyncio.create_task(generate(1))
    await asyncio.sleep(0.2)
    assert not waiting.done() and await llm.is_paused()
    await llm.resume_generation()
    assert await waiting == alone[0] and not await llm.is_paused()

    def fail() -> None:
        raise RuntimeError("the step failed")

    core.core.step_fn = fail
    for number in (4, 5):  # the one that is played, and one that comes later
        with pytest.raises(EngineDeadError):
            await generate(number)
    with pytest.raises(EngineDeadError):
        await llm.get_weight_version()
    assert llm.errored
    llm.shutdown()
