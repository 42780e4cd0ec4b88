"""Trajectories that several versions of the weights sampled: what ratios make of them, all sequences enumerated."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from ctpo_kernels.names import RatioMode
from ctpo_megatron.data import PackingRules, Trajectory, pack, token_sequences
from ctpo_megatron.objective.ratios import token_ratios
from ctpo_megatron.objective.sequences import SequenceBounds

WORDS, LENGTH = 3, 4
SAMPLED_BY = (1, 2, 2, 3)
"""Version of the weights that sampled each token of a trajectory; version 4 is trained."""
SEQUENCES = list(itertools.product(range(WORDS), repeat=LENGTH))


class SoftmaxModel:
    """A logit for every word after every prefix."""

    def __init__(self, version: int) -> None:
        self._generator = torch.Generator().manual_seed(version)
        prefixes = [prefix for length in range(LENGTH) for prefix in itertools.product(range(WORDS), repeat=length)]
        self._logits = {prefix: self._draw() for prefix in prefixes}

    def _draw(self) -> torch.Tensor:
        return torch.randn(WORDS, generator=self._generator, dtype=torch.float64)

    def log_prob(self, sequence: tuple[int, ...], place: int) -> float:
        return float(self._logits[sequence[:place]].log_softmax(0)[sequence[place]])


MODELS = {version: SoftmaxModel(version) for version in (1, 2, 3, 4)}


def sampler_log_probs(sequence: tuple[int, ...]) -> list[float]:
    return [MODELS[version].log_prob(sequence, place) for place, version in enumerate(SAMPLED_BY)]


def trainer_log_probs(sequence: tuple[int, ...]) -> list[float]:
    return [MODELS[4].log_prob(sequence, place) for place in range(LENGTH)]


def weights(mode: RatioMode) -> torch.Tensor:
    """`[sequences, LENGTH]`: the ratio of each token against what the samplers recorded, by way of a packed batch."""
    trajectories = []
    for number, sequence in enumerate(SEQUENCES):
        trajectory = Trajectory("p", number, seed=0)
        trajectory.append_context([9], turn=0)
        trajectory.append_model(sequence, sampler_log_probs(sequence), SAMPLED_BY, turn=1)
        trajectories.append(trajectory)
    [micro] = pack(token_sequences(trajectories), None, PackingRules(len(SEQUENCES) * (LENGTH + 1)))
    trained = torch.zeros(micro.num_tokens)
    for number, part in micro.places():
        trained[part.start + 1 : part.stop] = torch.tensor(trainer_log_probs(SEQUENCES[number]))
    layout = SequenceBounds.of(trained, micro.cu_seqlens)
    ratios = token_ratios(mode, trained, micro.rollout_log_probs, micro.response_mask, layout).log_ratio.exp()
    found = torch.zeros(len(SEQUENCES), LENGTH, dtype=torch.float64)
    for number, part in micro.places():
        found[number] = ratios[part.start + 1 : part.stop]
    return found


def errors_of_expectations(ratios: torch.Tensor) -> list[float]:
    """By place the largest |E_samplers[ratio g] - E_trainer[g]| over all g that tell one beginning from the others."""
    sampled = torch.tensor([math.exp(sum(sampler_log_probs(sequence))) for sequence in SEQUENCES], dtype=torch.float64)
    wanted = torch.tensor([math.exp(sum(trainer_log_probs(sequence))) for sequence in SEQUENCES], dtype=torch.float64)
    errors = []
    for place in range(LENGTH):
        difference = (sampled * ratios[:, place] - wanted).reshape(WORDS ** (place + 1), -1)  # by beginning
        errors.append(float(difference.sum(dim=1).abs().max()))
    return errors


def test_the_prefix_ratio_is_the_true_weight_whatever_sampled_each_token() -> None:
    found = weights("cumprod")
    for number, sequence in enumerate(SEQUENCES):
        trained, sampled = trainer_log_probs(sequence), sampler_log_probs(sequence)
        for place in range(LENGTH):
            true = math.exp(sum(trained[: place + 1])) / math.exp(sum(sampled[: place + 1]))
            assert float(found[number, place]) == pytest.approx(true, rel=1e-6)
    assert max(errors_of_expectations(found)) < 1e-6


def test_the_ratio_of_the_token_alone_is_biased() -> None:
    first, *others = errors_of_expectations(weights("token"))
    assert first < 1e-6 and min(others) > 0.3


def test_no_ratio_at_all_is_biased_from_the_first_token() -> None:
    """The proximal ratio of the first update is 1: what was sampled counts as if the trainer had."""
    proximal = errors_of_expectations(torch.ones(len(SEQUENCES), LENGTH, dtype=torch.float64))
    assert min(proximal) > 0.3
