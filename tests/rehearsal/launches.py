"""How many operators a layer gives the device in each direction, and how often a batch is copied to it.

An operator is one launch, or a few. What CUDA has as one operator or compiled function, and a CPU as several, counts
once: the norms of torch, and kernels of ours, whose launches `tests/kernels/test_kernels_layer.py` counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ctpo_kernels import layer_torch
from ctpo_megatron.config import PolicyConfig
from ctpo_megatron.policy import MiniBatch, Trainer, destroy_distributed, init_distributed, layers, policy_gradient
from tests.policy import models
from tests.rehearsal import streams, synchronizations
from tests.rehearsal.job import OBJECTIVE

_AT_ONCE: list[tuple[Any, str]] = [
    (layers._RMSNorm, "forward"),
    (layers._RMSNorm, "backward"),
    (layer_torch, "swiglu"),
    (layer_torch, "swiglu_gradient"),
    (layer_torch, "rotated"),
]
SEQUENCES = 4


@dataclass(frozen=True)
class Launches:
    """forward, recompute, backward: operators of a layer for a micro-batch of sequences of one length.

    copies: of a micro-batch to the device. copies_of_pass: of a forward and backward pass over it. pageable: those of
    them that are from memory that is not pinned.
    """

    forward: int
    recompute: int
    backward: int
    copies: int
    copies_of_pass: int
    pageable: int


class _Counts:
    """What is counted now. depth: calls under way that count once."""

    def __init__(self) -> None:
        self.operators, self.copies, self.depth = 0, 0, 0

    def at_once(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            self.operators += self.depth == 0
            self.depth += 1
            try:
                return function(*given, **named)
            finally:
                self.depth -= 1

        return call

    def launch(self, what: str, reads: Iterable[Any], writes: Iterable[Any]) -> None:
        reads = list(reads)
        self.copies += what == "copy" and not reads  # memory of the host is not that of a stream
        self.operators += self.depth == 0
        _launch(what, reads, writes)


_launch = streams.launch


@contextmanager
def _counting() -> Iterator[_Counts]:
    counts = _Counts()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "launch", counts.launch)
        patch.setattr(layers.RMSNorm, "forward", lambda self, x: layers.rms_norm(x, self.weight, self.eps))
        for owner, name in _AT_ONCE:
            kind = staticmethod if isinstance(owner, type) else (lambda function: function)
            patch.setattr(owner, name, kind(counts.at_once(getattr(owner, name))))
        yield counts


def count(family: str, folder: Path) -> Launches:
    """Of a layer: what a model of three layers launches beyond one of two."""
    forward, without, full = (
        three - two for three, two in zip(*(_operators(family, folder, number) for number in (3, 2)), strict=True)
    )
    with _policy(family, folder / "2", "none") as on, _counting() as counts:
        mini = _mini_batch(on)
        packed, counts.copies = counts.copies, 0
        on._passes.accumulate(mini, policy_gradient(OBJECTIVE, "behaviour"))
        pageable = [s for s in synchronizations.counted() if "pageable" in s.what]
        return Launches(forward, full - without, without - forward, packed, counts.copies, len(pageable))


def _operators(family: str, folder: Path, layers: int) -> list[int]:
    """Of a forward pass, of a forward and backward pass, and of one that computes all layers again."""
    models.build(family, folder / f"{layers}", layers=layers)
    found = []
    for recompute, training in (("none", False), ("none", True), ("full", True)):
        with _policy(family, folder / f"{layers}", recompute) as on:
            mini = _mini_batch(on)
            with _counting() as counts:
                if training:
                    on._passes.accumulate(mini, policy_gradient(OBJECTIVE, "behaviour"))
                else:
                    on._passes.score(mini.micro_batches)
            found.append(counts.operators)
    return found


@contextmanager
def _policy(family: str, model: Path, recompute: str) -> Iterator[Trainer]:
    config = PolicyConfig(
        timeout_minutes=2.0, micro_batch_tokens=1024, dtype="bfloat16", recompute=recompute, share_prefixes="off"
    )
    layout = init_distributed(config, seed=0)
    try:
        synchronizations.counted()
        yield Trainer(config, layout, model, temperature=0.9)
    finally:
        destroy_distributed()


def _mini_batch(on: Trainer) -> MiniBatch:
    (mini,) = on.distribute(models.trajectories(1) * SEQUENCES, models.advantages(SEQUENCES), size=SEQUENCES)
    assert len(mini.micro_batches) == 1
    return mini
