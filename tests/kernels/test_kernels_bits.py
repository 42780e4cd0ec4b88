"""What must not change a bit: backend, span, block, chunk, packing, the layout of advantages, repetition."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ctpo_kernels import SUMS
from ctpo_kernels.loss import loss_implementation, loss_stream
from ctpo_kernels.loss_torch import LossPass, merge_vectors, segment_totals
from ctpo_kernels.packed import LossTensors, PackedTokens
from ctpo_kernels.spec import LossSpec, inverse_of_loss_tokens
from tests.kernels.packings import LIMITED, boundaries, random_batch, run, same_bits, without
from tests.support.pairwise import pairwise

RATIOS = ["cumprod", "geomean", "token", "sequence", "sequence-geomean"]
LENGTHS = [150, 0, 70, 1, 64, 15]


def rough(seed: int, lengths: list[int], **options: Any) -> dict[str, Tensor]:
    """A batch whose log-probs use every bit of float32."""
    batch = random_batch(seed, lengths, **options)
    for name in ("log_probs", "old_log_probs"):
        batch[name] = batch[name] + 0.01 * torch.randn(batch[name].shape)
    return batch


def checked(batch: dict[str, Tensor], **keywords: Any) -> tuple[PackedTokens, LossSpec]:
    """What the implementations take."""
    tensors = {name: values for name, values in batch.items() if name != "log_probs"}
    return PackedTokens.of(batch["log_probs"], LossTensors(**tensors)), LossSpec(**keywords)


def same_decisions(a: LossPass, b: LossPass) -> bool:
    """Integers and decisions, and the statistics that count."""
    counts = [i for i, name in enumerate(SUMS) if name not in ("loss", "ratio_excess", "ratio_excess_squared")]
    return all(
        same_bits(x, y)
        for x, y in (
            (a.per_token.prefix, b.per_token.prefix),
            (a.per_token.clip, b.per_token.clip),
            (a.per_token.log_ratio, b.per_token.log_ratio),
            (a.vector[counts], b.vector[counts]),
        )
    )


@pytest.mark.parametrize(
    ("span", "block"),
    [
        (64, 16),
        (4096, 512),
        pytest.param(64, 64, marks=pytest.mark.slow),
        pytest.param(4096, 32, marks=pytest.mark.slow),
        pytest.param(16, 16, marks=pytest.mark.slow),
        pytest.param(128, 32, marks=pytest.mark.slow),
    ],
)
def test_spans_and_blocks(interpreter: None, monkeypatch: pytest.MonkeyPatch, span: int, block: int) -> None:
    """LOOK of 4 makes long sequences look back several times; COUNTED likewise for loss tokens that are not given."""
    from ctpo_kernels import loss_triton

    for keywords in ({}, LIMITED, {"ratio_mode": "sequence-geomean", "loss_agg_mode": "token-mean"}):
        batch, spec = checked(rough(3, LENGTHS, padding=9), **keywords)
        counted, given = (None, inverse_of_loss_tokens(batch)) if "loss_agg_mode" in keywords else (0.1, 0.1)
        expected = loss_triton.loss_pass(batch, spec, given, per_token=True)
        monkeypatch.setattr(loss_triton, "LOOK", 4)
        monkeypatch.setattr(loss_triton, "COUNTED", 4)
        found = loss_triton.loss_pass(batch, spec, counted, per_token=True, span=span, block=block)
        assert same_decisions(found, expected)
        assert same_bits(found.gradient, expected.gradient)
        assert same_bits(found.per_token.loss, expected.per_token.loss)
        torch.testing.assert_close(found.vector, expected.vector, rtol=1e-6, atol=1e-6)


CUTS = [[], [100], [1, 2, 3], [64, 128, 192, 256], [150, 220, 285], [149, 151, 299]]


@pairwise({"backend": ["torch", "triton"], "cuts": CUTS, "clip": [{}, LIMITED]}, indirect=["backend"])
def test_windows_of_a_stream(backend: str, cuts: list[int], clip: dict[str, Any]) -> None:
    """The carry between windows: ends inside, at, and just past the end of a sequence."""
    batch, spec = checked(rough(4, LENGTHS), **clip)
    implementation = loss_implementation(batch.log_probs)
    totals = segment_totals(batch)
    expected = implementation.loss_pass(batch, spec, 0.1, totals=totals)
    state = torch.zeros(batch.segments, 3, dtype=torch.int64)
    blank = replace(batch, log_probs=torch.zeros_like(batch.log_probs))
    stream = loss_stream(blank, spec, 0.1, totals=totals, state=state)
    edges = itertools.pairwise([0, *cuts, batch.tokens])
    gradients = []
    for start, end in edges:
        blank.log_probs[start:end] = batch.log_probs[start:end]
        gradients.append(stream.step(start, end))
    gradient = torch.cat(gradients)
    assert same_bits(gradient, expected.gradient)
    assert torch.equal(state, totals[:, :3])
    torch.testing.assert_close(stream.finish(), expected.vector, rtol=1e-6, atol=1e-6)


def test_a_window_longer_than_the_longest_span(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from ctpo_kernels import loss_triton

    batch, spec = checked(rough(4, LENGTHS), loss_agg_mode="token-mean")
    expected = loss_triton.loss_pass(batch, spec, 0.1)
    monkeypatch.setattr(loss_triton, "SPANS", (64, 128))
    state = torch.zeros(batch.segments, 3, dtype=torch.int64)
    stream = loss_triton.TritonLossStream(batch, spec, 0.1, totals=None, state=state)
    assert same_bits(stream.step(0, batch.tokens), expected.gradient)
    torch.testing.assert_close(stream.finish(), expected.vector, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("order", [[5, 4, 3, 2, 1, 0], [2, 0, 5, 1, 4, 3]])
def test_order_of_the_sequences(backend: str, order: list[int]) -> None:
    batch = rough(6, LENGTHS)
    bounds = batch["cu_seqlens"].tolist()
    rows = torch.cat([torch.arange(bounds[s], bounds[s + 1]) for s in order])
    other = {name: value[rows] for name, value in without(batch, "cu_seqlens").items()}
    other["cu_seqlens"] = boundaries([LENGTHS[s] for s in order])
    expected, found = run(batch), run(other)
    assert same_bits(found.gradient, expected.gradient[rows])
    assert same_bits(found.per_token.prefix, expected.per_token.prefix[rows])
    assert same_bits(found.per_token.clip, expected.per_token.clip[rows])


def test_company_and_padding(backend: str) -> None:
    """A sequence alone, in front of others, behind others, before padding."""
    batch = rough(7, LENGTHS)
    alone = {name: value[150:220] for name, value in without(batch, "cu_seqlens").items()}
    alone = run({**alone, "cu_seqlens": boundaries([70])}, global_batch_size=6)
    together = run(batch, global_batch_size=6)
    padded = {name: torch.cat([v, v[:33]]) for name, v in without(batch, "cu_seqlens").items()}
    padded = run({**padded, "cu_seqlens": batch["cu_seqlens"]}, global_batch_size=6)
    assert same_bits(together.gradient[150:220], alone.gradient)
    assert same_bits(padded.gradient[150:220], alone.gradient)
    assert same_bits(together.per_token.prefix[150:220], alone.per_token.prefix)
    assert not padded.gradient[300:].any()


def test_advantages_and_weights_per_sequence_or_per_token(backend: str) -> None:
    batch = rough(8, LENGTHS, padding=5)
    owner = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    for name in ("advantages", "weights"):
        batch[name] = torch.randn(len(LENGTHS)).abs() - (0.7 if name == "advantages" else 0.0)
    spread = {name: torch.cat([batch[name][owner], torch.full((5,), torch.nan)]) for name in ("advantages", "weights")}
    expected = run(batch)
    for part in (["advantages"], ["weights"], ["advantages", "weights"]):
        found = run({**batch, **{name: spread[name] for name in part}})
        assert same_bits(found.gradient, expected.gradient)
        assert same_bits(found.per_token, expected.per_token)
        assert same_bits(found.stats, expected.stats)


def test_repetition_and_dtype_of_the_boundaries(backend: str) -> None:
    batch = rough(9, LENGTHS)
    expected = run(batch)
    assert same_bits(run(batch), expected)
    assert same_bits(run({**batch, "cu_seqlens": batch["cu_seqlens"].long()}), expected)


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "token-mean", "seq-mean-token-sum"])
def test_micro_batches_with_the_counts_of_the_step_add_up(backend: str, mode: str) -> None:
    batch = rough(10, LENGTHS)
    whole = run(batch, loss_agg_mode=mode)
    counts = {"batch_num_tokens": int(whole.stats.sums[1]), "global_batch_size": len(LENGTHS)}
    found = []
    for first, last in ((0, 1), (1, 4), (4, 6)):
        start, end = sum(LENGTHS[:first]), sum(LENGTHS[:last])
        part = {name: value[start:end] for name, value in without(batch, "cu_seqlens").items()}
        found.append(run({**part, "cu_seqlens": boundaries(LENGTHS[first:last])}, loss_agg_mode=mode, **counts))
    gradient = torch.cat([part.gradient for part in found])
    if mode == "token-mean":  # counted on the device or given by the host: one rounding apart
        torch.testing.assert_close(gradient, whole.gradient, rtol=3e-7, atol=0.0)
    else:
        assert same_bits(gradient, whole.gradient)
    vectors = [torch.cat([part.stats.sums, part.stats.maxima]) for part in found]
    merged = merge_vectors(merge_vectors(vectors[0], vectors[1]), vectors[2])
    torch.testing.assert_close(merged, torch.cat([whole.stats.sums, whole.stats.maxima]), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sum(part.loss for part in found), whole.loss, rtol=1e-5, atol=1e-6)


def test_long_sequence_keeps_its_last_digit(backend: str) -> None:
    """S_t against exact integers over 4096 tokens whose float32 running sum would have drifted."""
    n = 4096 if backend == "torch" else 2500
    log_probs, old = -torch.rand(n), -torch.rand(n)
    units = torch.round((log_probs - old).double() * 2.0**40).to(torch.int64)
    found = run(
        {
            "log_probs": log_probs,
            "old_log_probs": old,
            "response_mask": torch.ones(n),
            "advantages": torch.ones(1),
            "cu_seqlens": boundaries([n]),
        }
    )
    assert torch.equal(found.per_token.prefix, units.cumsum(0))
