"""The Triton kernels on a GPU against the plain-torch twin and float64; without one, their bodies in the interpreter.

Sizes are those of the device: the interpreter gets a few hundred tokens. What only a GPU has (graphs, streams, its
allocator, rounding to bfloat16 in matrix products) is marked for it alone.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import ctpo_kernels as ck
from ctpo_kernels import loss_torch, rows_torch
from ctpo_kernels.packed import LossTensors, PackedTokens
from ctpo_kernels.rows_torch import Shard
from ctpo_kernels.spec import LossSpec
from tests.kernels.harness import observed, poisoned_memory
from tests.support.backends import use_backend

CUDA = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
on_cuda = pytest.mark.parametrize("cuda", [pytest.param("cuda", marks=CUDA)])
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "token weights and masks": {"per": "token"},
    "geomean, power -1/2": {"ratio_mode": "geomean", "clip_power": -0.5},
    "power from a table": {"clip_power": 0.3},
    "no dual clip, ratios beyond the cap": {"clip_c": None, "spread": 2.0, "per": "token"},
    "token ratio, token mean": {
        "ratio_mode": "token",
        "clip_mode": "ratio",
        "clip_c": 3.0,
        "loss_agg_mode": "token-mean",
    },
    "sequence-geomean": {"ratio_mode": "sequence-geomean", "clip_low": 3e-4, "clip_high": 4e-4, "clip_c": None},
}


@pytest.fixture(params=[pytest.param("cuda", marks=CUDA), pytest.param("interpreter", marks=pytest.mark.slow)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the Triton backend runs."""
    if request.param == "cuda":
        with use_backend("triton"):
            yield "cuda"
        return
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if torch.cuda.is_available():
        pytest.skip("triton compiles for the GPU in this process and cannot interpret too")
    # Kernels are interpreted if the variable is set when they are defined (tests/conftest.py).
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with use_backend("triton"), poisoned_memory(), observed():
        yield "cpu"


def loss_triton() -> Any:
    """Imported late: the fixture decides first how kernels are defined."""
    return importlib.import_module("ctpo_kernels.loss_triton")


def lengths(device: str) -> list[int]:
    """Sequences around the block sizes, an empty one, one of a single token."""
    return [5000, 1, 0, 2049, 1024, 300] if device == "cuda" else [130, 1, 0, 65]


def packed(device: str, *, per: str = "sequence", spread: float = 0.05, padding: int = 19) -> dict[str, Tensor]:
    """Arguments of `ctpo_loss` on the CPU; a fifth of the tokens is masked, the tail is padding."""
    g = torch.Generator().manual_seed(3)
    sizes = lengths(device)
    n, b = sum(sizes) + padding, len(sizes)
    old = -torch.rand(n, generator=g)
    mask = torch.rand(n, generator=g) < 0.8
    batch = {
        "log_probs": old + spread * torch.randn(n, generator=g),
        "old_log_probs": old,
        "response_mask": mask,
        "advantages": torch.randn(n if per == "token" else b, generator=g),
        "cu_seqlens": torch.tensor([0, *sizes]).cumsum(0),
    }
    if per == "token":
        batch |= {"weights": torch.rand(n, generator=g), "loss_mask": mask & (torch.rand(n, generator=g) < 0.8)}
    return batch


def on(device: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors on a device."""
    return {name: value.to(device) for name, value in values.items()}


def tokens_of(values: dict[str, Tensor]) -> PackedTokens:
    """The batch as the launchers take it."""
    tensors = {name: value for name, value in values.items() if name != "log_probs"}
    return PackedTokens.of(values["log_probs"], LossTensors(**tensors))


def relative(found: Tensor, wanted: Tensor) -> float:
    """Frobenius error, computed on the CPU in float64."""
    found, wanted = found.detach().cpu().double(), wanted.detach().cpu().double()
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("span", [128, 8192], ids=["many spans", "one span"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_short_and_long_spans_decide_as_the_twin_does(device: str, span: int, variant: str) -> None:
    options = dict(VARIANTS[variant])
    values = packed(device, per=options.pop("per", "sequence"), spread=options.pop("spread", 0.05))
    spec = LossSpec(**options)
    wanted = loss_torch.loss_pass(tokens_of(values), spec, 0.25, per_token=True)
    batch = tokens_of(on(device, values))
    found = loss_triton().loss_pass(batch, spec, 0.25, per_token=True, span=span)
    n = int(values["cu_seqlens"][-1])
    assert torch.equal(found.per_token.prefix.cpu()[:n], wanted.per_token.prefix[:n])
    assert torch.equal(found.per_token.clip.cpu()[:n], wanted.per_token.clip[:n])
    assert wanted.per_token.clip.unique().numel() > 2, "the batch must cross its bounds"
    assert relative(found.gradient, wanted.gradient) < 1e-6
    if variant.endswith("beyond the cap"):
        assert bool((wanted.per_token.clip == 4).any())
    assert not found.gradient[n:].any(), "padding must get the gradient 0"
    torch.testing.assert_close(found.vector.cpu(), wanted.vector, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found.loss.cpu(), wanted.loss, rtol=1e-5, atol=1e-6)


def test_pieces_of_sequences_continue_their_prefix(device: str) -> None:
    values = packed(device, padding=0)
    spec = LossSpec()
    whole = loss_torch.loss_pass(tokens_of(values), spec, 0.25, per_token=True)
    cu = values["cu_seqlens"]
    middle = cu[:-1] + cu.diff() // 3
    cut = values | {
        "cu_seqlens": torch.cat([torch.stack([cu[:-1], middle], dim=1).reshape(-1), cu[-1:]]),
        "advantages": values["advantages"].repeat_interleave(2),
    }
    batch = tokens_of(on(device, cut))
    totals = loss_triton().segment_totals(batch).view(-1, 2, 4)
    state = torch.zeros(totals.shape[0], 2, 3, dtype=torch.int64, device=device)
    state[:, 1] = totals[:, 0, :3]
    of_sequence = totals.sum(1).repeat_interleave(2, dim=0)
    for span in (128, 8192):
        found = loss_triton().loss_pass(
            batch, spec, 0.25, state=state.view(-1, 3), totals=of_sequence, per_token=True, span=span
        )
        assert torch.equal(found.per_token.prefix.cpu(), whole.per_token.prefix)
        assert torch.equal(found.per_token.clip.cpu(), whole.per_token.clip)
        assert relative(found.gradient, whole.gradient) < 1e-6


@pytest.mark.parametrize("windows", [1, 2, 5])
def test_the_sweep_has_the_same_bits_however_it_is_cut(device: str, windows: int) -> None:
    values = on(device, packed(device, padding=0))
    spec = LossSpec(loss_agg_mode="token-mean")
    whole = loss_triton().loss_pass(tokens_of(values), spec, 1.0)
    batch = tokens_of(values | {"log_probs": torch.zeros_like(values["log_probs"])})
    state = torch.zeros(batch.segments, 3, dtype=torch.int64, device=device)
    stream = loss_triton().TritonLossStream(batch, spec, 1.0, totals=None, state=state)
    edges = torch.linspace(0, batch.tokens, windows + 1).long().tolist()
    parts = []
    for start, end in itertools.pairwise(edges):
        batch.log_probs[start:end] = values["log_probs"][start:end]
        parts.append(stream.step(start, end))
    assert torch.equal(torch.cat(parts), whole.gradient)
    assert torch.equal(state, loss_triton().segment_totals(tokens_of(values))[:, :3])
    torch.testing.assert_close(stream.finish(), whole.vector, rtol=1e-6, atol=1e-6)


def test_a_repeated_call_gives_the_same_bits(device: str) -> None:
    results = []
    for _ in range(3):
        values = on(device, packed(device))
        log_probs = values.pop("log_probs").requires_grad_()
        loss, stats = ck.ctpo_loss(log_probs, **values)
        loss.backward()
        results.append((loss.detach(), log_probs.grad, stats.sums, stats.maxima))
    for again in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(again, results[0], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("inplace", [False, True])
def test_log_probs_of_logits_with_padding_columns(device: str, dtype: torch.dtype, inplace: bool) -> None:
    rows, columns, vocabulary = (300, 20011, 19999) if device == "cuda" else (5, 203, 197)
    g = torch.Generator().manual_seed(1)
    data = (4 * torch.randn(rows, columns, generator=g)).to(dtype)
    labels = torch.randint(0, vocabulary, (rows,), generator=g)
    labels[1] = -100
    upstream = torch.randn(rows, generator=g)
    exact = data[:, :vocabulary].double().requires_grad_()
    softmax = (exact / 0.7).log_softmax(-1)
    wanted = torch.where(labels == -100, 0.0, softmax.gather(1, labels.clamp(min=0)[:, None]).squeeze(1))
    wanted_gradient = torch.autograd.grad(wanted, exact, upstream.double(), retain_graph=True)[0]
    wanted_entropy = -(softmax.exp() * softmax).sum(1)

    logits = data.to(device).requires_grad_()
    found, entropy = ck.vocab_parallel_log_probs(
        logits, labels.to(device), None, 0.7, True, inplace, vocab_size=vocabulary
    )
    (gradient,) = torch.autograd.grad(found, logits, upstream.to(device))
    assert float((found.detach().cpu().double() - wanted.detach()).abs().max()) < 5e-6
    assert float((entropy.cpu().double() - wanted_entropy.detach()).abs().max()) < 2e-5
    # One rounding to the dtype: to nearest on a GPU, towards zero in the interpreter.
    allowed = 5e-6 if dtype == torch.float32 else 2.0**-8 if device == "cuda" else 2.0**-7
    assert relative(gradient[:, :vocabulary], wanted_gradient) < allowed
    assert not gradient[:, vocabulary:].any() and not gradient[1].any()
    assert (gradient.data_ptr() == logits.data_ptr()) == inplace


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_vocabulary_shards_merge_to_the_same_log_probs(device: str, shards: int) -> None:
    rows_triton = importlib.import_module("ctpo_kernels.rows_triton")
    rows, columns = (257, 5000) if device == "cuda" else (5, 96)
    g = torch.Generator().manual_seed(2)
    logits = 4 * torch.randn(rows, shards * columns, generator=g)
    logits[0, columns:] = float("-inf")
    valid = shards * columns - 37
    labels = torch.randint(0, valid if shards == 1 else columns, (rows,), generator=g)
    whole = rows_torch.merge_stats(
        rows_torch.row_stats(logits.double(), labels, Shard(0, valid), 1.0, entropy=True)[None], labels, 1.0
    )
    parts = [
        rows_triton.row_stats(
            logits[:, i * columns : (i + 1) * columns].to(device),
            labels.to(device),
            Shard(i * columns, min(columns, valid - i * columns)),
            1.0,
            entropy=True,
        )
        for i in range(shards)
    ]
    found = rows_triton.merge_stats(torch.stack(parts), labels.to(device), 1.0)
    assert float((found.log_probs.cpu() - whole.log_probs).abs().max()) < 5e-6
    assert float((found.lse.cpu() - whole.lse).abs().max()) < 5e-6
    assert float((found.entropy.cpu() - whole.entropy).abs().max()) < 2e-5


def head_batch(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """hidden, weight, labels, and the arguments of the loss, with prompt rows and ratios inside and outside."""
    hidden_size, vocabulary = (256, 4001) if device == "cuda" else (24, 101)
    values = packed(device, padding=0)
    g = torch.Generator().manual_seed(4)
    n = values["log_probs"].numel()
    hidden = torch.randn(n, hidden_size, generator=g).to(dtype)
    weight = (torch.randn(vocabulary, hidden_size, generator=g) / hidden_size**0.5).to(dtype)
    labels = torch.randint(0, vocabulary, (n,), generator=g)
    log_probs = (hidden.double() @ weight.double().t()).log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
    values["old_log_probs"] = (log_probs - (values["log_probs"] - values["old_log_probs"])).float()
    del values["log_probs"]
    return hidden, weight, labels, values


def plain_head(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    values: dict[str, Tensor],
    compute: torch.dtype,
    rounded: torch.dtype,
    found: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, d_hidden, d_weight through full logits in `compute`; d logits and results pass through `rounded`.

    found: the log-probs that are used instead of these logits' own.
    """
    x, w = hidden.to(compute), weight.to(compute)
    z = (x @ w.t()).requires_grad_()
    log_probs = z.log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
    with use_backend("torch"):
        loss = ck.ctpo_loss(log_probs + (found - log_probs).detach(), **values)[0]
        dz = torch.autograd.grad(loss, z)[0].to(rounded).to(compute)
    return loss.detach(), (dz @ w).to(rounded), (dz.t() @ x).to(rounded)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("chunk", [None, 100])
def test_the_streaming_head_is_as_exact_as_torch(device: str, dtype: torch.dtype, chunk: int | None) -> None:
    hidden, weight, labels, values = head_batch(device, dtype)
    x, w = hidden.to(device).requires_grad_(), weight.to(device).requires_grad_()
    # Products on tensor cores truncate, and S_t adds up what then has a direction: 3e-4 of the loss after 5,000 tokens
    # on an H200, and other tokens are clipped. Both log-probs of a ratio have it. So log-probs are compared first, then
    # what follows from them.
    log_probs = ck.linear_log_probs(x.detach(), w.detach(), labels.to(device), chunk_size=chunk).cpu().double()
    whole = (hidden.double() @ weight.double().t()).log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
    assert float((log_probs - whole).detach().abs().max()) < 5e-6
    exact = plain_head(hidden, weight, labels, values, torch.float64, torch.float64, log_probs)
    rounded = plain_head(hidden, weight, labels, values, torch.float32, dtype, log_probs.float())
    found = ck.fused_linear_ctpo(x, w, labels.to(device), **on(device, values), chunk_size=chunk)
    found[0].backward()
    assert abs(float(found[0].detach()) - float(exact[0])) < 1e-5
    for name, got, wanted, torch_run in zip(
        ("d_hidden", "d_weight"), (x.grad, w.grad), exact[1:], rounded[1:], strict=True
    ):
        error, allowed = relative(got, wanted), 2 * relative(torch_run, wanted)
        assert error <= max(allowed, 5e-6), f"{name}: {error:.1e}, torch {allowed / 2:.1e}"


def test_weight_gradients_add_up_in_main_grad(device: str) -> None:
    hidden, weight, labels, values = head_batch(device, torch.float32 if device == "cpu" else torch.bfloat16)
    arguments = (labels.to(device),)
    x, w = hidden.to(device).requires_grad_(), weight.to(device).requires_grad_()
    ck.fused_linear_ctpo(x, w, *arguments, **on(device, values))[0].backward()
    wanted, w.grad = w.grad.double(), None
    w.main_grad = torch.full(w.shape, 0.5, device=device)
    for _ in range(2):
        loss = ck.fused_linear_ctpo(x, w, *arguments, **on(device, values), accumulate_into_main_grad=True)[0]
        loss.backward()
    assert w.grad_added_to_main_grad
    # The reference was rounded to the weight's dtype once; 0.5 + sum is float32.
    allowed = 1e-5 + torch.finfo(w.dtype).eps + 1e-7 * float(w.main_grad.norm() / wanted.norm())
    assert relative((w.main_grad.double() - 0.5) / 2, wanted) < allowed


@on_cuda
def test_a_graph_replays_the_loss_on_new_inputs(cuda: str) -> None:
    values = on(cuda, packed(cuda))
    log_probs = values.pop("log_probs").requires_grad_()

    def step() -> tuple[Tensor, Tensor, Tensor]:
        loss, stats = ck.ctpo_loss(log_probs, **values)
        return loss, torch.autograd.grad(loss, log_probs)[0], stats.sums

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        log_probs += 0.01 * torch.randn_like(log_probs)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


@on_cuda
@pytest.mark.parametrize(
    "variant", ["default", "token weights and masks", "power from a table", "token ratio, token mean"]
)
def test_the_loss_never_waits_for_the_device(cuda: str, variant: str) -> None:
    options = dict(VARIANTS[variant])
    values = on(cuda, packed(cuda, per=options.pop("per", "sequence")))
    log_probs = values.pop("log_probs").requires_grad_()
    # The first call compiles, and makes the table of powers.
    ck.ctpo_loss(log_probs, **values, **options)[0].backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss, stats, per_token = ck.ctpo_loss(log_probs, **values, **options, return_per_token=True)
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(stats.sums.isfinite().all()) and bool(per_token.loss.isfinite().all())


@on_cuda
def test_memory_of_the_sweep_does_not_grow_with_tokens(cuda: str) -> None:
    hidden_size, vocabulary, chunk = 512, 32000, 512
    weight = torch.randn(vocabulary, hidden_size, device=cuda, dtype=torch.bfloat16).mul_(0.04).requires_grad_()
    peaks = {}
    for tokens in (2048, 2048, 16384):  # the first loads libraries
        x = torch.randn(tokens, hidden_size, device=cuda, dtype=torch.bfloat16, requires_grad=True)
        labels = torch.randint(0, vocabulary, (tokens,), device=cuda)
        mask = torch.ones(tokens, dtype=torch.bool, device=cuda)
        cu = torch.tensor([0, tokens], device=cuda)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        ck.fused_linear_ctpo(x, weight, labels, None, mask, torch.ones(1, device=cuda), cu, chunk_size=chunk)
        results = x.numel() * 2 + weight.numel() * 4
        peaks[tokens] = torch.cuda.max_memory_allocated() - before - results
    buffer = 4 * chunk * vocabulary
    per_token = 256 * 16384  # masks, sums and losses
    assert peaks[16384] < 1.1 * buffer + per_token, f"{peaks[16384]} bytes above results, a chunk is {buffer}"
    assert peaks[16384] - peaks[2048] < per_token


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_on_another_device_than_the_current_one() -> None:
    """Triton launches where torch stands, which is not where these tensors are."""
    logits, labels = torch.randn(33, 1000), torch.randint(0, 1000, (33,))
    with use_backend("triton"), torch.cuda.device(0):
        found = ck.vocab_parallel_log_probs(logits.to("cuda:1"), labels.to("cuda:1"))
    wanted = logits.double().log_softmax(1).gather(1, labels[:, None]).squeeze(1)
    assert found.device == torch.device("cuda:1")
    assert float((found.cpu() - wanted).abs().max()) < 5e-6
