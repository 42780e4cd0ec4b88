"""Checks of parallel layouts, experts and context parallelism: each mistake has one message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ctpo_megatron.base.installed import Trouble
from ctpo_megatron.config import (
    Config,
    policy_rules,
    prefix_note,
)
from tests.config.model import SPEC, found

Make = Callable[..., Config]

MOE = replace(SPEC, num_layers=4, num_experts=8, num_experts_per_token=2, moe_intermediate_size=64)


def test_tensor_parallel_ranks_divide_the_model(config_with: Make) -> None:
    texts = found(config_with("policy.tensor_model_parallel_size=3"), world_size=3)
    for amount in ("4 attention heads", "2 key/value heads", "256 MLP channels"):
        assert any(text.startswith("error: ") and f"does not divide the model's {amount}" in text for text in texts)


@pytest.mark.parametrize(
    ("overrides", "world_size", "expected"),
    [
        ("expert_model_parallel_size=3", 3, "does not divide the model's 8 experts"),
        ("expert_model_parallel_size=4", 2, "does not divide the 2 data x context parallel ranks"),
        ("tensor_model_parallel_size=2", 2, "policy.sequence_parallel = false: is needed by experts"),
        (
            "pipeline_model_parallel_size=2 virtual_pipeline_model_parallel_size=4",
            2,
            "= 4: x pipeline_model_parallel_size 2 does not divide the model's 4 layers",
        ),
    ],
)
def test_layouts_of_experts_and_chunks(config_with: Make, overrides: str, world_size: int, expected: str) -> None:
    config = config_with(*(f"policy.{override}" for override in overrides.split()))
    assert any(expected in problem for problem in found(config, world_size, MOE))


def test_good_layouts_of_experts_and_chunks(config_with: Make) -> None:
    pipeline = ("policy.pipeline_model_parallel_size=2", "policy.virtual_pipeline_model_parallel_size=2")
    experts = ("policy.expert_model_parallel_size=2", "policy.context_parallel_size=2")
    assert found(config_with(*pipeline, *experts, "policy.router_replay=true"), 4, MOE) == []


REPLAY = "policy.router_replay=true"
NO_CACHE, ROUTED = "extra={enable_prefix_caching: false}", "extra={enable_return_routed_experts: true}"


@pytest.mark.parametrize(
    ("engine", "cuda", "expected"),
    [
        (["tensor_parallel_size=2"], False, "needs engines of one worker"),
        ([], True, 'rollout.engine.model_runner = "v1": reports no experts'),
        (
            ["model_runner=v2", NO_CACHE],
            True,
            "extra.enable_prefix_caching = false: must stay on with policy.router_rep",
        ),
        ([ROUTED], False, "extra.enable_return_routed_experts = true: is set elsewhere; use policy.router_replay"),
    ],
)
def test_replay_of_experts(config_with: Make, engine: list[str], cuda: bool, expected: str) -> None:
    (text,) = found(config_with(REPLAY, *(f"rollout.engine.{key}" for key in engine)), spec=MOE, cuda=cuda)
    assert expected in text


def test_training_experts_without_replay_is_warned_of(config_with: Make) -> None:
    (text,) = found(config_with(), spec=MOE)
    assert "warning: policy.router_replay = false: is off, and the model is a mixture of experts" in text


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


BFLOAT16 = ("policy.dtype=bfloat16", "rollout.engine.dtype=bfloat16", "rollout.mismatch_limit=null")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), ["(policy.dtype: float32)", "not in the memory plan", "and policy.dtype: bfloat16, or split"]),
        ((*BFLOAT16, "policy.layer_spec=local"), ["(policy.layer_spec: local)", "and policy.layer_spec: auto"]),
        (BFLOAT16, ["(it is not installed here)", "install it (docs/install_cuda.md), or split"]),
    ],
)
def test_context_parallelism_in_local_layers_says_what_it_holds(
    config_with: Make, overrides: tuple[str, ...], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_rules, "te_trouble", lambda: Trouble("not whole", "mend it"))
    config = config_with(*overrides, "policy.context_parallel_size=2")
    (text,) = found(config, 2, cuda=True)
    assert text.startswith("warning: policy.context_parallel_size = 2: without Transformer Engine's layers")
    assert all(part in text for part in said), text
    assert found(config, 2) == []  # a CPU has no other layers


def test_context_parallelism_in_layers_of_transformer_engine_says_nothing(
    config_with: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_rules, "te_trouble", lambda: None)
    monkeypatch.setattr(policy_rules, "is_installed", lambda name: True)
    assert found(config_with(*BFLOAT16, "policy.context_parallel_size=2"), 2, cuda=True) == []


ONCE = "tokens with the same history are computed once"


@pytest.mark.parametrize(
    ("overrides", "cuda", "note"),
    [
        (BFLOAT16, True, f"{ONCE}, in attention for each sequence"),
        ((*BFLOAT16, "policy.layer_spec=local"), True, ONCE),
        ((), True, ONCE),  # float32 has local layers
        (BFLOAT16, False, ONCE),
        (
            (*BFLOAT16, "policy.context_parallel_size=2"),
            True,
            "not shared: sequences are split (policy.context_parallel_size)",
        ),
        ((*BFLOAT16, "policy.share_prefixes=off"), True, "not shared: policy.share_prefixes is off"),
    ],
)
def test_the_dry_run_says_what_is_computed_once(
    config_with: Make, overrides: tuple[str, ...], cuda: bool, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_rules, "te_trouble", lambda: None)
    monkeypatch.setattr(policy_rules, "is_installed", lambda name: True)
    assert prefix_note(config_with(*overrides), cuda=cuda) == note
