"""examples/token_masks: which tokens stay in the loss, against plain Python, however the step is packed."""

from __future__ import annotations

import itertools
import math
from functools import partial
from pathlib import Path

import pytest
import torch

from ctpo_megatron.base.extensions import activate
from ctpo_megatron.checks import check_extensions
from ctpo_megatron.config import load_config
from ctpo_megatron.objective import (
    Denominators,
    Objective,
    ObjectiveInputs,
    function_loss,
    load_objective,
    merge,
    objective_from_config,
    summarize,
)
from tests.end_to_end.small_run import SMALL, records
from tests.extend.scripted import ROOT, trained

FOLDER = ROOT / "examples" / "token_masks"
LENGTHS = [7, 1, 12, 5]
VERSION = 9


def example(name: str) -> Objective:
    config = load_config(FOLDER / f"{name}.yaml")
    activate(config.extensions.path or ())
    assert config.objective.function is not None
    return load_objective(config.objective.function)


def step(sequences: range = range(len(LENGTHS))) -> ObjectiveInputs:
    """Some sequences of one optimizer step."""
    ends = [0, *itertools.accumulate(LENGTHS)]
    g = torch.Generator().manual_seed(3)
    n = ends[-1]
    log_probs, difference = -torch.rand(n, generator=g), 0.3 * torch.randn(n, generator=g)
    response = torch.rand(n, generator=g) < 0.8
    mask = response & (torch.rand(n, generator=g) < 0.9)
    advantages, entropy = torch.randn(n, generator=g), torch.rand(n, generator=g)
    part = slice(ends[sequences.start], ends[sequences.stop])
    return ObjectiveInputs(
        log_probs=log_probs[part].clone().requires_grad_(),
        old_log_probs=(log_probs - difference)[part],
        rollout_log_probs=(log_probs - difference)[part],
        advantages=advantages[part],
        response_mask=response[part],
        loss_mask=mask[part],
        cu_seqlens=torch.tensor([end - part.start for end in ends[sequences.start : sequences.stop + 1]]),
        denominators=Denominators.of_counts(int(mask[a:b].sum()) for a, b in itertools.pairwise(ends)),
        entropy=entropy[part],
        weight_version=(VERSION - torch.arange(n) % 3)[part].to(torch.int32),
        version=VERSION,
    )


def sequences_of(inputs: ObjectiveInputs) -> list[list[int]]:
    """The loss tokens of each sequence."""
    bounds = itertools.pairwise(inputs.cu_seqlens.tolist())
    return [[i for i in range(a, b) if inputs.loss_mask[i]] for a, b in bounds]


def gradient(function: Objective, inputs: ObjectiveInputs, name: str) -> tuple[list[float], dict[str, float]]:
    objective = objective_from_config(load_config(FOLDER / f"{name}.yaml").objective)
    output = function_loss(function, inputs, objective)
    (found,) = torch.autograd.grad(output.loss, inputs.log_probs)
    return found.tolist(), summarize(output.stats)


def test_m2po_leaves_out_the_furthest_tokens_until_the_moment_is_small() -> None:
    inputs = step()
    d = (inputs.log_probs.detach() - inputs.rollout_log_probs).tolist()
    kept: set[int] = set()
    for tokens in sequences_of(inputs):
        while tokens and math.fsum(d[i] ** 2 for i in tokens) / len(tokens) > 0.04:
            tokens.remove(max(tokens, key=lambda i: d[i] ** 2))
        kept |= {*tokens}
    loss_tokens = [i for tokens in sequences_of(inputs) for i in tokens]
    assert 5 < len(kept) < len(loss_tokens)
    found, metrics = gradient(example("m2po"), inputs, "m2po")
    a, total = inputs.advantages.tolist(), inputs.denominators.tokens
    expected = [-a[i] * math.exp(d[i]) / total if i in kept else 0.0 for i in range(len(d))]
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-9)
    assert metrics["objective/kept"] == pytest.approx(len(kept) / len(loss_tokens))
    ages = [VERSION - int(inputs.weight_version[i]) for i in loss_tokens if i not in kept]
    assert metrics["objective/age_of_cut"] == pytest.approx(sum(ages) / len(ages))


def test_high_entropy_keeps_the_share_of_each_sequence() -> None:
    inputs = step()
    h, kept = inputs.entropy.tolist(), set[int]()
    for tokens in sequences_of(inputs):
        ordered = sorted(h[i] for i in tokens)
        if ordered:
            place = 0.8 * (len(ordered) - 1)
            low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
            kept |= {i for i in tokens if h[i] >= low + (place % 1) * (high - low) - 1e-6}
    loss_tokens = sum(map(len, sequences_of(inputs)))
    assert 2 < len(kept) < 0.5 * loss_tokens
    found, metrics = gradient(example("high_entropy"), inputs, "high_entropy")
    assert {i for i, value in enumerate(found) if value} <= kept
    ratio = (inputs.log_probs.detach() - inputs.old_log_probs).exp().tolist()
    a, total = inputs.advantages.tolist(), inputs.denominators.tokens
    for i in kept:
        inside = ratio[i] <= 1.2 if a[i] > 0 else ratio[i] >= 0.8
        assert found[i] == pytest.approx(-a[i] * ratio[i] / total if inside else 0.0, rel=1e-5)
    assert metrics["objective/kept"] == pytest.approx(len(kept) / loss_tokens)


@pytest.mark.parametrize("name", ["m2po", "high_entropy"])
def test_the_loss_does_not_depend_on_micro_batches(name: str) -> None:
    function = example(name)
    loss = partial(
        function_loss, function, objective=objective_from_config(load_config(FOLDER / f"{name}.yaml").objective)
    )
    whole, parts = loss(step()), [loss(step(range(0, 2))), loss(step(range(2, 4)))]
    assert sum(part.loss.item() for part in parts) == pytest.approx(whole.loss.item(), rel=1e-5)
    merged, expected = summarize(merge([part.stats for part in parts])), summarize(whole.stats)
    assert merged == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["m2po", "high_entropy"])
def test_the_configuration_passes_the_checks_of_a_dry_run(name: str) -> None:
    check_extensions(load_config(FOLDER / f"{name}.yaml"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["m2po", "high_entropy"])
def test_it_trains(name: str, tmp_path: Path) -> None:
    run, _ = trained(tmp_path, [FOLDER / f"{name}.yaml"], *SMALL, "run.steps=1", f"run.name={name}", deadline_s=280)
    assert 0 < records(run)[-1]["objective/kept"] <= 1
