"""Tokens with the same history are computed once: log-probs and gradients are those of whole sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ctpo_megatron.config import PolicyConfig
from ctpo_megatron.data import Trajectory
from ctpo_megatron.objective import PolicyObjective
from ctpo_megatron.policy import (
    Layout,
    MiniBatch,
    Trainer,
    destroy_distributed,
    gather_objects,
    init_distributed,
    layers,
    policy_gradient,
)
from ctpo_megatron.policy.context import ContextSplit, Targets
from ctpo_megatron.policy.model import _build_gpt
from ctpo_megatron.policy.passes import LogitsPredictions
from tests.policy import models, te_layers
from tests.policy.jobs import EP2, PP2, SP2
from tests.support import ranks

TEMPERATURE = 0.7


@pytest.fixture(params=["local layers", "whole sequences"])
def attention(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of rows, and that of Transformer Engine's layers."""
    if request.param == "whole sequences":
        te_layers.install(monkeypatch.setattr)


@pytest.fixture(scope="module")
def layout() -> Iterator[Layout]:
    yield init_distributed(PolicyConfig(), seed=0)
    destroy_distributed()


def trajectories(seed: int, groups: int = 4, samples: int = 4, tokens: int = 3) -> list[Trajectory]:
    """Few different tokens, so that histories are often the same: also identical samples, prefixes of others, answers
    of one token, tool output."""
    draw, made = np.random.default_rng(seed), list[Trajectory]()
    system = draw.integers(tokens, size=5).tolist()
    for group in range(groups):
        prompt = system + draw.integers(tokens, size=draw.integers(1, 6)).tolist()
        for sample in range(samples):
            each = Trajectory(f"p{group}", sample, seed=0)
            each.append_context(prompt, turn=0)
            for turn in range(1, int(draw.integers(2, 4))):
                count = 1 if sample == 1 else int(draw.integers(1, 12))
                each.append_model(draw.integers(tokens, size=count).tolist(), [-1.0] * count, [0] * count, turn)
                if draw.random() < 0.5:
                    each.append_context(draw.integers(tokens, size=2).tolist(), turn)
            if sample == 3:
                each.tokens = made[-1].tokens.copy()
            made.append(each)
    return made


ADVANTAGES = (1.0, -0.5, 0.0, 2.0)


def passed(
    layout: Layout, path: Path, share: str, given: list[Trajectory], **settings: Any
) -> tuple[list[MiniBatch], dict[str, torch.Tensor]]:
    """Old log-probs and the gradient of one optimizer step."""
    policy = Trainer(PolicyConfig(share_prefixes=share, **settings), layout, path, temperature=TEMPERATURE)
    values = [ADVANTAGES[number % len(ADVANTAGES)] for number in range(len(given))]
    made = policy.distribute(given, values, size=len(given))
    policy.compute_old_log_probs(made)
    _, gradients = policy.gradients(made[0], policy_gradient(PolicyObjective.preset("ctpo"), "behaviour"))
    return made, {name: tensor.double().clone() for name, tensor in gradients}


def by_sequence(made: list[MiniBatch], column: str) -> dict[int, torch.Tensor]:
    return {
        place: getattr(micro, column)[tokens].double()
        for mini in made
        for micro in mini.micro_batches
        for place, tokens in micro.places()
    }


@pytest.mark.parametrize("head", ["logits", "streaming"])
@pytest.mark.parametrize("tokens", [2, 500])
@pytest.mark.parametrize("micro_batch_tokens", [8192, 96])
def test_log_probs_and_gradients_are_those_of_whole_sequences(
    head: str, tokens: int, micro_batch_tokens: int, attention: None, layout: Layout, tmp_path: Path
) -> None:
    models.build("qwen3-tied", tmp_path)
    given, settings = trajectories(0, tokens=tokens), {"head": head, "micro_batch_tokens": micro_batch_tokens}
    whole, expected = passed(layout, tmp_path, "off", given, **settings)
    shared, found = passed(layout, tmp_path, "auto", given, **settings)
    assert not any(micro.forest for mini in whole for micro in mini.micro_batches)
    assert any(micro.forest for mini in shared for micro in mini.micro_batches)
    for column in ("old_log_probs", "entropy", "log_probs"):
        mine = by_sequence(shared, column)
        for place, values in by_sequence(whole, column).items():
            assert torch.allclose(mine[place], values, atol=1e-5), (column, place)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        apart = torch.linalg.vector_norm(found[name] - tensor)
        assert apart <= 2e-5 * torch.linalg.vector_norm(tensor), (name, float(apart / torch.linalg.vector_norm(tensor)))


@pytest.mark.parametrize("head", ["logits", "streaming"])
def test_micro_batches_without_shared_tokens_may_be_among_others(
    head: str, attention: None, layout: Layout, tmp_path: Path
) -> None:
    models.build("qwen3-untied", tmp_path)
    given = [*trajectories(0, groups=2, tokens=500), *models.trajectories(8)]
    _, expected = passed(layout, tmp_path, "off", given, head=head, micro_batch_tokens=96)
    shared, found = passed(layout, tmp_path, "auto", given, head=head, micro_batch_tokens=96)
    assert {micro.forest is None for micro in shared[0].micro_batches} == {True, False}
    for name, tensor in expected.items():
        assert torch.linalg.vector_norm(found[name] - tensor) <= 2e-5 * torch.linalg.vector_norm(tensor), name


def test_flops_of_attention_are_those_of_what_it_computes(attention: None, layout: Layout, tmp_path: Path) -> None:
    models.build("qwen3-tied", tmp_path)
    work, given = {}, models.trajectories(8, groups=True)
    for share in ("off", "auto"):
        policy = Trainer(PolicyConfig(share_prefixes=share), layout, tmp_path, temperature=TEMPERATURE)  # type: ignore[arg-type]
        (mini,) = policy.distribute(given, models.advantages(8), size=8)
        work[share] = mini.work
    spec, all_tokens, distinct = policy.spec, work["off"].distinct_tokens, work["auto"].distinct_tokens
    prompts = [int(np.argmax(each.response_mask)) for each in given if each.sample_index]
    assert all_tokens - distinct == sum(prompts)  # those of all samples of a group but one
    pairs = [length * (length + 1) // 2 for length in prompts]
    attention_of_prompts = 4 * spec.num_layers * spec.num_attention_heads * spec.head_dim * sum(pairs)
    saved = sum(spec.forward_flops(length, 0) for length in prompts)
    if policy._model.whole_attention:
        saved -= attention_of_prompts
    assert work["off"].trained_flops - work["auto"].trained_flops == saved


@pytest.mark.parametrize("multiple", [1, 11])
def test_in_float64_they_are_equal_to_rounding(
    multiple: int, attention: None, layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a module of the same layers, without Megatron's buffers of gradients, which are float32.

    multiple: of the rows, as for sequence parallelism. 9 of them are of no token then.
    """
    models.build("qwen3-tied", tmp_path)
    monkeypatch.setattr(layers, "rms_norm", lambda x, weight, eps: F.rms_norm(x, weight.shape, weight, eps))
    found: dict[str, tuple[dict[int, torch.Tensor], dict[str, torch.Tensor]]] = {}
    for share in ("off", "auto"):
        config = PolicyConfig(share_prefixes=share, head="logits")  # type: ignore[arg-type]
        policy = Trainer(config, layout, tmp_path, temperature=TEMPERATURE)
        policy._rules = replace(policy._rules, batch_multiple=multiple)
        module = _build_gpt(policy._model.config, policy.spec, config, None)
        module.load_state_dict(policy._model.gpt[0].state_dict())
        module.double()
        (mini,) = policy.distribute(given := trajectories(2, tokens=2), [1.0, -0.5] * (len(given) // 2), len(given))
        log_probs = dict[int, torch.Tensor]()
        for micro in mini.micro_batches:
            assert micro.num_rows % multiple == 0 and (micro.forest is None) == (share == "off")
            assert micro.forest is None or micro.num_rows - micro.distinct_tokens == (9 if multiple > 1 else 0)
            split = ContextSplit.of(micro.cu_seqlens)
            packed = layers.packed_sequences(micro, split, whole_attention=policy._model.whole_attention)
            rows = packed.take(micro.token_ids)[None], packed.take(micro.position_ids)[None]
            output = module(*rows, attention_mask=None, packed_seq_params=packed)
            targets = Targets.of(micro, split)
            made = LogitsPredictions(targets, TEMPERATURE, policy._model, output[0]).log_probs()
            assert made.dtype == torch.float64
            (made * targets.labels.double().cos() * targets.advantages).sum().backward()
            log_probs |= {place: targets.per_token(made)[tokens] for place, tokens in micro.places()}
        gradients = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
        found[share] = log_probs, gradients
    (whole, expected), (shared, mine) = found.values()
    assert max(float((shared[place] - values).abs().max()) for place, values in whole.items()) <= 1e-12
    for name, tensor in expected.items():
        assert torch.linalg.vector_norm(mine[name] - tensor) <= 1e-12 * torch.linalg.vector_norm(tensor), name


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param("qwen3-tied", PP2 | {"micro_batch_tokens": 192}, id="PP"),
        pytest.param("qwen3-tied", {"recompute": "full"} | SP2, id="SP, full recompute"),
        pytest.param("qwen3-tied", {"recompute": "selective"} | SP2, id="SP, recomputed attention"),
        pytest.param("qwen3-moe-decided", EP2, id="experts"),
    ],
)
def test_whole_sequences_in_attention_on_two_ranks(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    models.build(family, tmp_path)
    for log_probs, gradients in ranks.run(apart_on_a_rank, tmp_path, settings, ranks=2):
        assert log_probs <= 1e-5 and gradients <= 2e-5


def apart_on_a_rank(path: Path, settings: dict[str, Any]) -> tuple[float, float]:
    """How far passes of Transformer Engine's layers with and without sharing are apart: log-probs and gradients."""
    te_layers.install()
    layout = init_distributed(PolicyConfig(**settings), seed=0)
    given = trajectories(2, tokens=3)
    (whole, expected), (shared, found) = (passed(layout, path, share, given, **settings) for share in ("off", "auto"))
    assert any(micro.forest for mini in shared for micro in mini.micro_batches)
    mine, other = (
        {place: values for rank in gather_objects(own) for place, values in rank.items()}
        for own in ((by_sequence(made, "log_probs") if layout.has_loss else {}) for made in (shared, whole))
    )
    log_probs = max(float((mine[place] - values).abs().max()) for place, values in other.items())
    norms = [(torch.linalg.vector_norm(found[name] - t), torch.linalg.vector_norm(t)) for name, t in expected.items()]
    destroy_distributed()
    return log_probs, max(float(apart / norm) for apart, norm in norms)
