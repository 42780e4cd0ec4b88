"""`warm_up` compiles every kernel that the calls of a run launch, as Triton tells compiled kernels apart."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from ctpo_kernels import ctpo_loss, linear_log_probs, warm_up
from tests.kernels.compiling import code

# Which kernels `warm_up` launches, and calls like those of a run that launch another; on CPU tensors, taken for CUDA's.
RECORD = """
from itertools import product
from benchmarks.kernels.aot_launches import recorded
import torch
import ctpo_kernels as ck
from ctpo_kernels import LossTensors, dispatch

dispatch._obstacle = lambda device, dtype: None
COLUMNS, LENGTHS = 500, ([3, 30, 16], [1000], [16] * 20, [7] * 40)
torch.manual_seed(0)

def batch(lengths, old, loss_mask, advantages, weights, counts, masks, cu, unaligned=False):
    n, b = sum(lengths), len(lengths)
    per = {"token": (1, n), "sequence": (b, 1)}
    place = (lambda x: torch.cat([x[:1], x])[1:]) if unaligned else (lambda x: x)  # an address that is off by one
    mask = (torch.rand(n) < 0.7).to(masks)
    return LossTensors(
        place(torch.zeros(n)) if old else None,
        place(mask),
        torch.ones(per[advantages]),
        torch.tensor([0, *lengths]).cumsum(0).to(cu),
        place(mask.clone()) if loss_mask else None,
        torch.ones(per[weights]) if weights else None,
        *{"numbers": (n, b), "tensors": (torch.tensor(n), torch.tensor(b)), "none": (None, None)}[counts],
    )

def run_of(b, loss, dtype, functions, chunk, entropy):
    n = b.response_mask.numel()
    hidden, weight = torch.randn(n, 24).to(dtype).requires_grad_(), torch.randn(COLUMNS, 24).to(dtype).requires_grad_()
    labels, given = torch.zeros(n, dtype=torch.int64), b._asdict()
    options = {"return_entropy": entropy, "vocab_size": 490}
    if ck.linear_log_probs in functions:
        found = ck.linear_log_probs(hidden, weight, labels, mask=b.response_mask, chunk_size=chunk, **options)
        (found[0] + found[1] if entropy else found).sum().backward()
        ck.fused_linear_ctpo(hidden, weight, labels, **given, **loss, chunk_size=chunk, skip_zero_tiles=False,
                             temperature=0.9, **options)[0].backward()
    else:
        logits = torch.randn(n, COLUMNS).to(dtype).requires_grad_()
        found = ck.vocab_parallel_log_probs(logits, labels, inplace_backward=not entropy, **options)
        (found[0] + found[1] if entropy else found).sum().backward()
        ck.ctpo_loss(torch.randn(n, requires_grad=True), **given, **loss, return_per_token=entropy)[0].backward()

# Layouts: each value of each choice, and the choices of the trainer. Objectives of the paper and its rivals.
LAYOUTS = [
    (True, True, "token", None, "numbers", torch.bool, torch.int32),
    (False, True, "token", "token", "numbers", torch.bool, torch.int32),
    (True, False, "sequence", "sequence", "tensors", torch.uint8, torch.int64),
    (True, True, "sequence", "token", "none", torch.int64, torch.int64),
]
LOSSES = [
    {},
    {"ratio_mode": "token", "clip_mode": "detached_ratio", "clip_low": 1.0, "clip_high": 4.0, "clip_c": None,
     "loss_agg_mode": "token-mean"},
    {"ratio_mode": "geomean", "clip_power": -0.5, "loss_agg_mode": "seq-mean-token-sum"},
    {"ratio_mode": "sequence-geomean", "clip_power": 0.3},
]
streaming, logits = (ck.linear_log_probs, ck.fused_linear_ctpo), (ck.vocab_parallel_log_probs, ck.ctpo_loss)
kernels, missing = set(), []
for number, (layout, loss) in enumerate(product(LAYOUTS, LOSSES)):
    given_logits = (number + number // 4) % 2 == 0
    functions = logits if given_logits else streaming
    dtype = torch.bfloat16 if given_logits and number % 2 else torch.float32
    entropy = number % 3 == 0
    def warm():
        ck.warm_up(COLUMNS, dtype, [batch([4, 6], *layout)], functions=functions, loss=loss, vocab_size=490,
                   return_entropy=entropy, return_per_token=entropy)
    warmed = {launch.key: launch for launch in recorded(warm, "")}
    lengths = LENGTHS[number % 4]
    for unaligned, chunk in ((False, 128), (True, 40)):
        b = batch(lengths, *layout, unaligned)
        for launch in recorded(lambda: run_of(b, loss, dtype, functions, chunk, entropy), ""):
            kernels.add(launch.kernel)
            if launch.key not in warmed:
                missing.append((number, launch.kernel, unaligned))
print(sorted(kernels), missing)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_nothing_is_left_to_compile() -> None:
    done = code(RECORD)
    assert done.returncode == 0, done.stderr
    kernels = ["count", "gradient", "loss", "merge", "reduce", "row_stats", "span_totals"]
    assert done.stdout.strip() == f"{[f'{name}_kernel' for name in kernels]} []"


def test_kernels_run_on_the_default_batch(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever grad mode says; and twice, because nothing is kept."""
    from triton.runtime.interpreter import GridExecutor

    run, launched = GridExecutor.__call__, []

    def note(self: GridExecutor, *arguments: object, **named: object) -> None:
        launched.append(self.fn.__name__)
        run(self, *arguments, **named)

    monkeypatch.setattr(GridExecutor, "__call__", note)
    with torch.no_grad():
        warm_up(40, torch.float32, device="cpu")
        assert not torch.is_grad_enabled()
    streaming = {"row_stats_kernel", "merge_kernel", "loss_kernel", "reduce_kernel", "gradient_kernel"}
    assert set(launched) == streaming
    warm_up(40, torch.float32, device="cpu", functions=[ctpo_loss], loss={"loss_agg_mode": "token-mean"})
    assert set(launched) - streaming == {"span_totals_kernel", "count_kernel"}


def test_the_torch_backend_has_nothing_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "mm", None)
    warm_up(1 << 40, device="cpu")


def test_functions_that_are_not_ours_are_refused() -> None:
    with pytest.raises(ValueError, match=r"functions: expected some of ctpo_loss, .*; got <built-in method mm"):
        warm_up(40, device="cpu", functions=[linear_log_probs, torch.mm])
