"""Random packings, masks and keywords: `ctpo_loss` and `fused_linear_ctpo` against the float64 reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ctpo_kernels import SUMS
from tests.kernels.heads import random_head, sweep
from tests.kernels.packings import LIMITED, assert_reference, distance, random_batch, run, same_bits, without
from tests.kernels.reference import ctpo_loss_reference, linear_ctpo_reference
from tests.support.backends import use_backend


def interpreted(examples: int) -> settings:
    """The interpreter is slow: a failing example is shown as it was found, not shrunk."""
    return settings(max_examples=examples, derandomize=True, phases=[Phase.explicit, Phase.generate])


def drawn(few: int, many: int) -> pytest.MarkDecorator:
    """The number of examples: few of them, and many in the slow tests."""
    return pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.slow)])


LENGTHS = st.lists(st.integers(0, 24), min_size=0, max_size=6)


@st.composite
def keywords(draw: st.DrawFn) -> dict[str, Any]:
    """Any combination that `ctpo_loss` takes."""
    chosen: dict[str, Any] = {
        "ratio_mode": draw(st.sampled_from(["cumprod", "geomean", "token", "sequence", "sequence-geomean"])),
        "loss_agg_mode": draw(st.sampled_from(["seq-mean-token-mean", "token-mean", "seq-mean-token-sum"])),
        "loss_scale_factor": draw(st.sampled_from([1.0, 8.5])),
        "batch_num_tokens": draw(st.sampled_from([None, 0, 400])),
        "global_batch_size": draw(st.sampled_from([None, 0, 30])),
        "clip_power": draw(st.sampled_from([0.0, 0.5, -0.5, 0.3, -1.2])),
    }
    chosen["clip_mode"] = draw(st.sampled_from(["log_power", "ratio", "detached_ratio"]))
    if chosen["clip_mode"] == "log_power":
        bounds = {"clip_low": [0.0, 0.025, 0.4], "clip_high": [0.0, 0.05], "clip_c": [None, -1.0, 0.05, 0.0]}
    else:
        dual = [None, 1.5] if chosen["clip_mode"] == "ratio" else [None, -1.0]
        bounds = {"clip_low": [0.0, 0.2, 1.0], "clip_high": [0.0, 0.28], "clip_c": dual}
    return chosen | {name: draw(st.sampled_from(values)) for name, values in bounds.items()}


@st.composite
def batches(draw: st.DrawFn, dtype: torch.dtype) -> dict[str, Tensor]:
    """Packed batches; optional arguments come and go, and values are per token or per sequence."""
    lengths = draw(LENGTHS)
    spread = draw(st.sampled_from([0.0, 0.02, 0.3, 4.0]))
    padding = draw(st.sampled_from([0, 0, 3]))
    assume(sum(lengths) + padding != len(lengths))  # flat values per token are refused then
    batch = random_batch(draw(st.integers(0, 10**6)), lengths, spread=spread, dtype=dtype, padding=padding)
    for name in ("advantages", "weights"):
        if draw(st.booleans()):
            batch[name] = torch.linspace(-1.0 if name == "advantages" else 0.2, 1.5, len(lengths)).to(dtype)
    absent = [name for name in ("loss_mask", "weights") if draw(st.integers(0, 3)) == 0]
    if draw(st.integers(0, 5)) == 0:
        batch["old_log_probs"] = None
    return without(batch, *absent)


@given(batch=batches(torch.float64) | batches(torch.float32), chosen=keywords())
@settings(max_examples=250, derandomize=True)
def test_twin(batch: dict[str, Tensor], chosen: dict[str, Any]) -> None:
    with use_backend("torch"):
        assert_reference(run(batch, **chosen), ctpo_loss_reference(**batch, **chosen))


@drawn(8, 25)
def test_interpreter(interpreter: None, examples: int) -> None:
    @given(batch=batches(torch.float32), chosen=keywords())
    @interpreted(examples)
    def check(batch: dict[str, Tensor], chosen: dict[str, Any]) -> None:
        found = run(batch, **chosen)
        assert_reference(found, ctpo_loss_reference(**batch, **chosen))
        with use_backend("torch"):
            twin = run(batch, **chosen)
        assert same_bits(found.per_token.prefix, twin.per_token.prefix)
        assert same_bits(found.per_token.clip, twin.per_token.clip)

    check()


@given(
    seed=st.integers(0, 10**6),
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    vocab=st.integers(2, 19),
    padded=st.integers(0, 3),
    chunk=st.sampled_from([None, 1, 5, 8]),
    temperature=st.sampled_from([1.0, 0.7, 2.0]),
    spread=st.sampled_from([0.02, 0.5]),
    chosen=keywords(),
)
@settings(max_examples=60, derandomize=True)
def test_head_in_float64(
    seed: int,
    lengths: list[int],
    vocab: int,
    padded: int,
    chunk: int | None,
    temperature: float,
    spread: float,
    chosen: dict[str, Any],
) -> None:
    assume(sum(lengths) != len(lengths))  # flat values per token are refused then
    size = {"width": 4, "vocab": vocab, "padded": padded}
    head = random_head(seed, lengths, **size, temperature=temperature, spread=spread).double()
    with use_backend("torch"):
        found = sweep(head, chunk_size=chunk, **chosen)
    expected = linear_ctpo_reference(**head.arguments(), **chosen)
    assert distance(found.log_probs, expected.log_probs) <= 1e-12
    # Each d_t is rounded to 2^-40 = 9e-13: that, and not float64, bounds r where log-probs are no multiples of it.
    for name in ("d_hidden", "d_weight"):
        assert distance(getattr(found, name), getattr(expected, name)) <= 1e-11
    assert float(found.loss) == pytest.approx(expected.loss.loss, rel=1e-10, abs=1e-11)
    assert found.stats.sums.tolist() == pytest.approx([expected.loss.stats[name] for name in SUMS], rel=1e-9, abs=1e-9)


@drawn(5, 15)
def test_head_interpreted(interpreter: None, examples: int) -> None:
    @given(
        seed=st.integers(0, 10**6),
        lengths=st.lists(st.integers(0, 12), min_size=1, max_size=4),
        chunk=st.sampled_from([None, 5, 8]),
        ratio=st.sampled_from(["cumprod", "geomean", "token", "sequence", "sequence-geomean"]),
        clip=st.sampled_from([{}, LIMITED]),
    )
    @interpreted(examples)
    def check(seed: int, lengths: list[int], chunk: int | None, ratio: str, clip: dict[str, Any]) -> None:
        assume(sum(lengths) != len(lengths))
        head = random_head(seed, lengths, width=4, vocab=19, padded=2, temperature=0.8)
        found = sweep(head, chunk_size=chunk, ratio_mode=ratio, **clip)
        expected = linear_ctpo_reference(**head.arguments(), ratio_mode=ratio, **clip)
        assert distance(found.d_hidden, expected.d_hidden) <= 5e-6
        assert distance(found.d_weight, expected.d_weight) <= 5e-6
        assert math.isclose(float(found.loss), expected.loss.loss, rel_tol=1e-5, abs_tol=1e-5)

    check()
