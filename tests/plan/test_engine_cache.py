"""The KV cache that an engine on a CPU gets where none is given: for the batch, within the machine's memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ctpo_megatron.plan import (
    CpuCache,
    free_memory,
)
from tests.config.model import SPEC as SMALL
from tests.support.minimal import minimal

SPEC = replace(SMALL, num_layers=4)
EACH = 2 * SPEC.num_layers * SPEC.num_key_value_heads * SPEC.head_dim * 4
MIB = 2**20


def cache(free_mib: float = 1e6, *, nodes: int = 1, dtype: str = "float32", **rollout: Any) -> CpuCache:
    engine = {"max_model_len": 1000, "max_num_seqs": 64} | rollout.pop("engine", {})
    sampled = {"prompts_per_step": 4, "samples_per_prompt": 8, "engine": engine} | rollout
    config = minimal(policy={"dtype": dtype}, cluster={"nodes": nodes}, rollout=sampled)
    return CpuCache.of(config, SPEC, int(free_mib * MIB))


@pytest.mark.parametrize(
    ("settings", "sequences"),
    [
        ({}, 32),
        ({"samples_per_prompt": 1}, 4),
        ({"oversample": 2}, 48),
        ({"prompts_per_step": 400}, 64),  # max_num_seqs
        ({"engines": 3}, 11),
        ({"engine": {"max_num_seqs": 2}}, 2),
    ],
)
@pytest.mark.parametrize(("dtype", "each"), [("float32", EACH), ("bfloat16", EACH // 2), ("float16", EACH // 2)])
def test_it_holds_all_that_is_sampled_at_once(settings: dict[str, Any], sequences: int, dtype: str, each: int) -> None:
    found = cache(dtype=dtype, **settings)
    needed = sequences * 1000 * each
    assert found.sequences == sequences and needed <= found.mb * MIB <= needed * 1.03 + 32 * each + MIB
    assert f"{sequences} sequences x 1,000 tokens x {each:,} bytes" in str(found)


def test_it_takes_no_more_than_half_of_the_memory_that_is_free() -> None:
    assert cache(100).mb == cache(100).most_mb == 50 < cache().mb
    assert cache(60, engines=2).mb == 15
    assert cache(60, engines=2, nodes=2).mb == 30


def test_it_holds_one_sequence_at_least_and_says_what_the_machine_has() -> None:
    short = cache(2)
    assert short.mb == short.least_mb >= 1000 * EACH / MIB and short.most_mb == 1 < short.mb


def test_what_is_given_stays() -> None:
    assert cache(engine={"kv_cache_mb": 7}).mb == 7


def test_the_free_memory_is_measured() -> None:
    assert 64 * MIB < free_memory() < 2**50
