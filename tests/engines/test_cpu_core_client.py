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

    from ctpo_megatron.engines.cpu.core_client import in_process_engine

    path, draw = root / "model", random.Random(0)
    settings = AsyncEngineArgs(**CpuSetup().arguments(make_config(path, root), str(path)))
    llm = in_process_engine(settings, threads=1, gather=False)  # not patched: every number of tokens is compiled

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


def test_outputs_are_those_that_vllm_would_have_given_token_by_token(tmp_path: Path) -> None:
    build_tiny_model(tmp_path / "model", favour={})
    done = prefork().run(compare_with_vllm, tmp_path, deadline_s=120)
    assert done.returncode == 0, done.stderr[-4000:]


def compare_with_vllm(root: Path) -> int:
    os.environ.update(CpuSetup().environment(EngineConfig()))
    asyncio.run(_compare_with_vllm(root))
    return 0


async def _compare_with_vllm(root: Path) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine.logprobs import LogprobsProcessor
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    from ctpo_megatron.engines.cpu.core_client import InProcessCore

    of_vllm = TopKTopPSampler.forward_cpu, LogprobsProcessor._update_sample_logprobs
    path = root / "model"
    llm = patched_engine(AsyncEngineArgs(**CpuSetup().arguments(make_config(path, root), str(path))))
    core: Any = llm.engine_core
    assert isinstance(core, InProcessCore)
    requests, rounds = core.core.scheduler.requests, 0

    async def generate(number: int, length: int, **settings: Any) -> tuple[Any, ...]:
        # The sampler draws for every row; a request without a seed must not disturb those that have one.
        shared = {"seed": number or None, "ignore_eos": True, "logprobs": 0, "flat_logprobs": True}
        final = {"output_kind": RequestOutputKind.FINAL_ONLY, "detokenize": False}
        params = SamplingParams(max_tokens=length, **shared | final | settings)
        prompt, last = tokens_input([5 + number % 40, 9, 8]), None
        async for output in llm.generate(prompt, params, f"{rounds}-{number}-{length}"):
            last = output.outputs[0]
        assert last is not None
        flat, spans = last.logprobs, last.weight_versions
        indices = (flat.start_indices, flat.end_indices, flat.token_ids, flat.logprobs, flat.ranks, flat.decoded_tokens)
        versions = [(span.version, span.start, span.end) for span in spans]
        total = round(last.cumulative_logprob, 4)
        return last.token_ids, indices, total, last.finish_reason, last.stop_reason, last.text, versions

    async def play() -> list[tuple[Any, ...]]:
        await llm.update_weight_version("3")
        seeded = [generate(number, 20 + 4 * number) for number in range(1, 40)]
        stopped = [generate(number, 90, stop_token_ids=list(range(5, 20))) for number in range(90, 99)]
        read = [generate(99, 30, stop=["1", "2"], detokenize=True, output_kind=RequestOutputKind.CUMULATIVE)]
        tasks = [asyncio.create_task(each) for each in (*seeded, *stopped, *read)]
        noise = asyncio.create_task(generate(0, 60))
        given_up = asyncio.create_task(generate(100, 200))
        while not under_way("-100-"):
            await asyncio.sleep(0.001)
        await llm.pause_generation(mode="keep", clear_cache=True)
        await llm.update_weight_version("4")
        await llm.resume_generation()
        given_up.cancel()
        most_held = 0
        while not noise.done() or not all(task.done() for task in tasks):
            held = core._gathered._held.values() if core._gathered else ()
            most_held = max([most_held, *map(len, list(held))])
            await asyncio.sleep(0.001)
        found = await asyncio.gather(*tasks)
        assert core._gathered is None or not core._gathered._held
        assert most_held <= 64
        return found

    def under_way(name: str) -> bool:
        return any(name in each and request.num_output_tokens > 5 for each, request in requests.items())

    ours = await play()
    assert {version for each in ours for version, *_ in each[-1]} == {"3", "4"}
    rounds, core._gathered = 1, None
    TopKTopPSampler.forward_cpu, LogprobsProcessor._update_sample_logprobs = of_vllm
    sampler = core.core.model_executor.driver_worker.worker.model_runner.sampler.topk_topp_sampler
    sampler.forward = sampler.forward_cpu  # bound when it was made
    for mine, theirs in zip(ours, await play(), strict=True):
        assert mine[:-1] == theirs[:-1]  # the versions change at another token of each
        assert mine[-1][-1][-1] == theirs[-1][-1][-1] == len(mine[0])
    llm.shutdown()


def test_norms_are_computed_by_the_kernel(tmp_path: Path) -> None:
    build_tiny_model(tmp_path / "model", favour={})
    done = prefork().run(normalize, tmp_path, deadline_s=120)
    assert done.returncode == 0, done.stderr[-4000:]


def normalize(root: Path) -> int:
    os.environ.update(CpuSetup().environment(EngineConfig()))
    asyncio.run(_normalize(root))
    return 0


async def _normalize(root: Path) -> None:
    from vllm import ir
    from vllm.engine.arg_utils import AsyncEngineArgs

    from ctpo_megatron.engines.cpu.rmsnorm import use_kernel_for_norms

    path = root / "model"
    settings = CpuSetup().arguments(make_config(path, root), str(path))
    decided = AsyncEngineArgs(**settings, kernel_config={"ir_op_priority": {"rms_norm": ["native"]}})
    use_kernel_for_norms(decided)
    order = decided.kernel_config.ir_op_priority
    assert (order.rms_norm, order.fused_add_rms_norm) == (["native"], ["ctpo_cpu", "native"])
    llm = patched_engine(AsyncEngineArgs(**settings))
    norm, added = ir.ops.rms_norm, ir.ops.fused_add_rms_norm
    assert [op.get_priority()[0] for op in (norm, added)] == ["ctpo_cpu", "ctpo_cpu"]
    for width, dtype, limit in ((32, torch.float32, 3e-6), (96, torch.float32, 3e-6), (128, torch.bfloat16, 0.02)):
        both = torch.randn(70, 3 * width).to(dtype)
        weight = torch.randn(width).to(dtype)
        for x in (both[:, :width].contiguous(), both[:, width : 2 * width], both.view(70, 3, width)[:, 1:]):
            right = norm.impls["native"].impl_fn(x, weight, 1e-6)
            assert norm.dispatch(x, weight, 1e-6).provider == "ctpo_cpu"
            torch.testing.assert_close(norm(x, weight, 1e-6), right, atol=limit, rtol=limit)
        x, residual = both[:, :width].contiguous(), both[:, width : 2 * width].contiguous()
        right = added.impls["native"].impl_fn(x, residual, weight, 1e-6)
        for found, expected in zip(added.maybe_inplace(x.clone(), residual.clone(), weight, 1e-6), right, strict=True):
            torch.testing.assert_close(found, expected, atol=limit, rtol=limit)
    odd, ones = torch.randn(7, 40), torch.ones(40)
    assert norm.dispatch(odd, ones, 1e-6).provider == added.dispatch(odd, odd, ones, 1e-6).provider == "native"
    assert added.dispatch(odd[:, :32], odd[:, :32], ones[:32], 1e-6).provider == "native"
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

    from ctpo_megatron.engines.cpu.core_client import InProcessCore

    path = root / "model"
    llm = patched_engine(AsyncEngineArgs(**CpuSetup().arguments(make_config(path, root), str(path))))
    assert torch.get_num_threads() == 1
    core: Any = llm.engine_core
    assert isinstance(core, InProcessCore)

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
