"""Checks of parallel layouts, experts and context parallelism: each mistake has one message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ctpo_megatron.base.installed import Trouble
from ctpo_megatron.config import Config
from ctpo_megatron.preflight import configuration, plan_tables
from ctpo_megatron.preflight.plan import evaluations
from tests.config.model import SPEC, found

Make = Callable[..., Config]

MOE = replace(SPEC, num_layers=4, num_experts=8, num_experts_per_token=2, moe_intermediate_size=64)


def test_tensor_parallel_ranks_divide_the_model(config_with: Make) -> None:
    texts = found(config_with("policy.tensor_model_parallel_size=3"), world_size=3)
    for amount in ("4 attention heads", "2 key/value heads", "256 MLP channels"):
        assert any(text.startswith("error: ") and f"does not divide the model's {amount}" in text for text in texts)


def test_layout_arithmetic(config_with: Make) -> None:
    config = config_with("policy.tensor_model_parallel_size=2", "data.eval=[x]", "eval.every=3")
    layout, batch, tokens = plan_tables(config, 8).values()
    assert ("data parallel", "4", "world size / (tensor x pipeline x context)") in layout
    assert [value for _, value, _ in batch] == ["256", "8", "32", "8", "32", "0", "3"]
    assert evaluations(config) == 3  # before the first step, after step 3, after the last (4)
    assert [value for _, value, _ in tokens] == ["240", "61,440", "245,760"]
    twice = plan_tables(config_with("policy.passes_per_batch=2"), 8)["Batch arithmetic"]
    assert ("optimizer steps", "64", "4 batches x 8 x 2 passes") in twice


@pytest.mark.parametrize(
    ("overrides", "world_size", "expected"),
    [
        (["policy.expert_model_parallel_size=3"], 3, "does not divide the model's 8 experts"),
        (["policy.expert_model_parallel_size=4"], 2, "does not divide the 2 data x context parallel ranks"),
        (["policy.tensor_model_parallel_size=2"], 2, "policy.sequence_parallel = false: is needed by experts"),
        (
            ["policy.pipeline_model_parallel_size=2", "policy.virtual_pipeline_model_parallel_size=4"],
            2,
            "= 4: x pipeline_model_parallel_size 2 does not divide the model's 4 layers",
        ),
    ],
)
def test_layouts_of_experts_and_chunks(config_with: Make, overrides: list[str], world_size: int, expected: str) -> None:
    assert any(expected in problem for problem in found(config_with(*overrides), world_size, MOE))


def test_good_layouts_of_experts_and_chunks(config_with: Make) -> None:
    pipeline = ("policy.pipeline_model_parallel_size=2", "policy.virtual_pipeline_model_parallel_size=2")
    experts = ("policy.expert_model_parallel_size=2", "policy.context_parallel_size=2")
    assert found(config_with(*pipeline, *experts, "policy.router_replay=true"), 4, MOE) == []


@pytest.mark.parametrize(
    ("overrides", "cuda", "expected"),
    [
        ([], False, "warning: policy.router_replay = false: is off, and the model is a mixture of experts"),
        (["policy.router_replay=true", "rollout.engine.tensor_parallel_size=2"], False, "needs engines of one worker"),
        (["policy.router_replay=true"], True, 'rollout.engine.model_runner = "v1": reports no experts'),
        (
            [
                "policy.router_replay=true",
                "rollout.engine.model_runner=v2",
                "rollout.engine.extra={enable_prefix_caching: false}",
            ],
            True,
            "rollout.engine.extra.enable_prefix_caching = false: must stay on with policy.router_replay",
        ),
        (
            ["policy.router_replay=true", "rollout.engine.extra={enable_return_routed_experts: true}"],
            False,
            "rollout.engine.extra.enable_return_routed_experts = true: is set elsewhere; use policy.router_replay",
        ),
    ],
)
def test_replay_of_experts(config_with: Make, overrides: list[str], cuda: bool, expected: str) -> None:
    (text,) = found(config_with(*overrides), spec=MOE, cuda=cuda)
    assert expected in text


def test_replay_of_experts_fits_the_model(config_with: Make) -> None:
    replay = "policy.router_replay=true"
    assert "policy.router_replay = true: the model has no experts; set false" in found(config_with(replay))[0]
    (text,) = found(config_with(replay), spec=replace(MOE, num_experts_per_token=1))
    assert "policy.router_replay = true: needs two experts a token" in text
    assert found(config_with(replay, "rollout.engine.model_runner=v2"), spec=MOE, cuda=True) == []


def test_modules_of_dense_layers_are_not_those_of_experts(config_with: Make) -> None:
    experts = replace(SPEC, num_experts=8, num_experts_per_token=2, moe_intermediate_size=64)
    modules = ["policy.recompute=selective", "policy.recompute_modules=[mlp,moe]"]
    replay = ("policy.router_replay=true", "rollout.engine.model_runner=v2")
    (text,) = found(config_with(*modules, replay[0]), spec=experts)
    assert "policy.recompute_modules" in text and "mlp: not in the layers of a mixture of experts" in text
    fused = ["policy.recompute=selective", "policy.recompute_modules=[layernorm,moe_act]", "policy.dtype=bfloat16"]
    engine = ["rollout.engine.dtype=bfloat16", "rollout.mismatch_limit=null"]
    assert found(config_with(*fused, *engine, *replay), spec=experts, cuda=True) == []
    (text,) = found(config_with(*fused, *engine, *replay, "policy.layer_spec=local"), spec=experts, cuda=True)
    assert "layernorm and moe_act need Transformer Engine's layers" in text


@pytest.mark.parametrize(
    ("overrides", "why", "held", "fix"),
    [
        # 120 x 240 entries of a boolean and a float32 mask; keys and values of 240 tokens, 4 heads of 32, in float32
        ([], "policy.dtype: float32", "0.1 MiB for a sequence of 240 tokens", "0.2 MiB: not in the memory plan"),
        (["policy.dtype=bfloat16", "policy.layer_spec=local"], "policy.layer_spec: local", "0.1 MiB", "0.1 MiB: not"),
        (
            ["policy.dtype=bfloat16"],
            "it is not installed here",
            "0.1 MiB",
            "install it (docs/install_cuda.md), or split",
        ),
    ],
)
def test_context_parallelism_in_local_layers_says_what_it_holds(
    config_with: Make, overrides: list[str], why: str, held: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configuration, "te_trouble", lambda: Trouble("not whole", "mend it"))
    engine = ["rollout.engine.dtype=bfloat16", "rollout.mismatch_limit=null"] if overrides else []
    config = config_with(*overrides, *engine, "policy.context_parallel_size=2")
    (text,) = found(config, 2, cuda=True)
    assert text.startswith("warning: policy.context_parallel_size = 2: without Transformer Engine's layers")
    assert all(part in text for part in (f"({why})", held, fix)), text
    assert found(config, 2) == []  # a CPU has no other layers


def test_context_parallelism_in_layers_of_transformer_engine_says_nothing(
    config_with: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configuration, "te_trouble", lambda: None)
    monkeypatch.setattr(configuration, "is_installed", lambda name: True)
    engine = ["rollout.engine.dtype=bfloat16", "rollout.mismatch_limit=null"]
    config = config_with(*engine, "policy.dtype=bfloat16", "policy.context_parallel_size=2")
    assert found(config, 2, cuda=True) == []
