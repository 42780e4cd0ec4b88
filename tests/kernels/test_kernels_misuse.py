"""What the kernels refuse, and whether the message names what is wrong."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ctpo_kernels
from ctpo_kernels import ctpo_loss, dispatch, fused_linear_ctpo, linear_log_probs, vocab_parallel_log_probs
from ctpo_kernels.spec import LossSpec
from tests.kernels.heads import random_head
from tests.kernels.packings import random_batch
from tests.support.backends import use_backend
from tests.support.deadlines import scaled

N, B = 36, 3


@pytest.mark.parametrize("version", ["1.13.1", "2.9.1+cu130"])
def test_a_torch_without_mixed_addmm_is_refused(version: str) -> None:
    with pytest.raises(ImportError, match=f"needs torch 2.10 or newer .* this is {re.escape(version)}"):
        dispatch.require_torch(version)
    for newer in ("2.10.0a0+git1234", "2.13.0+cpu", "3.0"):
        dispatch.require_torch(newer)


def loss_with(**changes: Any) -> None:
    ctpo_loss(**{**random_batch(1, [20, 10, 6]), **changes})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"log_probs": torch.zeros(N, dtype=torch.bfloat16)}, TypeError, "log_probs must be float32 .*bfloat16"),
        ({"log_probs": torch.zeros(N, dtype=torch.float16)}, TypeError, "log_probs must be float32 .*float16"),
        ({"log_probs": torch.zeros(6, 6)}, ValueError, r"log_probs must be packed \[N\] .* got shape \[6, 6\]"),
        ({"old_log_probs": torch.zeros(7)}, ValueError, r"old_log_probs has shape \[7\]; expected \[36\]"),
        ({"response_mask": torch.ones(2, 18)}, ValueError, r"response_mask has shape \[2, 18\]; expected \[36\]"),
        ({"loss_mask": torch.ones(B)}, ValueError, r"loss_mask has shape \[3\]; expected \[36\]$"),
        ({"advantages": torch.ones(4)}, ValueError, r"advantages has shape \[4\]; expected \[36\] or \[3\] or"),
        ({"advantages": torch.ones(3, 36)}, ValueError, r"expected .* or \[1, 36\] or \[3, 1\]$"),
        ({"response_mask": torch.ones(1, N)}, ValueError, r"response_mask has shape \[1, 36\]; expected \[36\]$"),
        ({"weights": torch.ones(())}, ValueError, r"weights has shape \[\]; expected \[36\] or \[3\] or"),
        ({"weights": torch.ones(N, device="meta")}, ValueError, "weights is on meta, log_probs on cpu"),
        ({"old_log_probs": torch.ones(N, device="meta")}, ValueError, "old_log_probs is on meta"),
        ({"cu_seqlens": torch.tensor([0.0, 36.0])}, TypeError, "cu_seqlens must be integers; got torch.float32"),
        ({"cu_seqlens": torch.tensor([False, True])}, TypeError, "cu_seqlens must be integers; got torch.bool"),
        ({"cu_seqlens": torch.zeros(0, dtype=torch.int32)}, ValueError, r"cu_seqlens must be \[B \+ 1\]"),
        ({"cu_seqlens": torch.zeros(2, 2, dtype=torch.int32)}, ValueError, r"cu_seqlens must be \[B \+ 1\]"),
        ({"cu_seqlens": torch.tensor([1, 20, 30, 36])}, ValueError, r"cu_seqlens must rise from 0 .*\[1, 20"),
        ({"cu_seqlens": torch.tensor([0, 30, 20, 36])}, ValueError, "cu_seqlens must rise"),
        ({"cu_seqlens": torch.tensor([0, 20, 30, 37])}, ValueError, "at most 36"),
        ({"clip_low": -0.1}, ValueError, "clip_low: must not be negative; got -0.1"),
        ({"clip_high": float("nan")}, ValueError, "clip_high: must be a finite number; got nan"),
        ({"clip_power": float("inf")}, ValueError, "clip_power: must be a finite number"),
        ({"clip_c": float("nan")}, ValueError, "clip_c: must be a number, or None"),
        ({"clip_mode": "ratio", "clip_low": 1.5}, ValueError, "clip_low: 1 - clip_low bounds a ratio"),
        ({"clip_mode": "ratio", "clip_c": 0.5}, ValueError, "clip_c: with clip_mode 'ratio'"),
        ({"clip_mode": "detached_ratio", "clip_low": 1.5, "clip_c": None}, ValueError, "clip_low: 1 - clip_low bounds"),
        ({"clip_mode": "detached_ratio"}, ValueError, "clip_c: clip_mode 'detached_ratio' has no dual bound: .* 0.05"),
        ({"ratio_mode": "cumprd"}, ValueError, "ratio_mode: unknown 'cumprd'; did you mean 'cumprod'"),
        ({"clip_mode": "log"}, ValueError, "clip_mode: unknown 'log'; did you mean 'log_power'"),
        ({"loss_agg_mode": "token_mean"}, ValueError, "loss_agg_mode: unknown 'token_mean'; .*'token-mean'"),
        ({"loss_scale_factor": 0.0}, ValueError, "loss_scale_factor: must be positive; got 0.0"),
        ({"unknown": 1}, TypeError, "unknown"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_loss_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        loss_with(**changes)


def test_every_bad_keyword_is_reported_at_once() -> None:
    with pytest.raises(ValueError) as caught:
        loss_with(ratio_mode="x", clip_mode="y", loss_agg_mode="z", clip_low=-1.0, clip_high=-2.0, loss_scale_factor=-3)
    for name in ("ratio_mode", "clip_mode", "loss_agg_mode", "clip_low", "clip_high", "loss_scale_factor"):
        assert f"{name}: " in str(caught.value)


HEAD_CASES = [
    ({"hidden": torch.zeros(N, 5)}, ValueError, r"hidden \[N, H\] and weight \[V, H\] do not fit: \[36, 5\]"),
    ({"hidden": torch.zeros(N)}, ValueError, "hidden .* do not fit"),
    ({"weight": torch.zeros(37, 12, dtype=torch.float64)}, TypeError, "must both be float64 or neither: .*float64"),
    (
        {"hidden": torch.zeros(N, 12).half(), "weight": torch.zeros(37, 12).bfloat16()},
        TypeError,
        "hidden and weight have no common floating dtype: torch.float16 and torch.bfloat16",
    ),
    ({"weight": torch.zeros(37, 12, dtype=torch.int64)}, TypeError, "have no common floating dtype: .*torch.int64"),
    ({"weight": torch.zeros(37, 12, device="meta")}, ValueError, "weight is on meta, hidden on cpu"),
    ({"labels": torch.zeros(5, dtype=torch.int64)}, ValueError, r"labels has shape \[5\]; expected \[36\]"),
    ({"labels": torch.zeros(N)}, TypeError, "labels must be integers; got torch.float32"),
    ({"labels": torch.zeros(N, dtype=torch.bool)}, TypeError, "labels must be integers; got torch.bool"),
    ({"labels": torch.zeros(N, dtype=torch.int64, device="meta")}, ValueError, "labels is on meta"),
    ({"labels": torch.full((N,), 37)}, ValueError, r"labels\[\d+\] is 37; expected 0..36, or -100"),
    ({"labels": torch.full((N,), -7)}, ValueError, r"labels\[\d+\] is -7; expected"),
    ({"vocab_size": 38}, ValueError, r"vocab_size must be in 1\.\.37 .*; got 38"),
    ({"vocab_size": 0}, ValueError, "vocab_size must be in"),
    ({"temperature": 0.0}, ValueError, "temperature must be positive and finite; got 0.0"),
    ({"temperature": float("nan")}, ValueError, "temperature must be positive"),
    ({"temperature": float("inf")}, ValueError, "temperature must be positive"),
]


@pytest.mark.parametrize("case", HEAD_CASES)
def test_head_arguments(case: tuple[dict[str, Any], type[Exception], str]) -> None:
    changes, error, message = case
    head = random_head(1, [20, 10, 6])
    with pytest.raises(error, match=message):
        fused_linear_ctpo(**{**head.arguments(), **changes})
    operands = {name: getattr(head, name) for name in ("hidden", "weight")}
    with pytest.raises(error, match=message):
        linear_log_probs(**{**operands, "labels": head.labels.clamp(min=0), **changes})


@pytest.mark.parametrize(
    ("logits", "labels", "error", "message"),
    [
        (torch.zeros(4), torch.zeros(4, dtype=torch.int64), ValueError, r"logits must be floating-point \[N, V\]"),
        (torch.zeros(4, 3, dtype=torch.int64), torch.zeros(4, dtype=torch.int64), ValueError, "logits must be"),
        (torch.zeros(4, 3), torch.zeros(5, dtype=torch.int64), ValueError, r"labels has shape \[5\]"),
        (torch.zeros(4, 3), torch.tensor([0, 1, 2, 3]), ValueError, r"labels\[3\] is 3; expected 0\.\.2"),
    ],
)
def test_log_prob_arguments(logits, labels, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        vocab_parallel_log_probs(logits, labels)


def test_mask_and_rows_that_do_not_fit() -> None:
    head = random_head(1, [20, 10, 6])
    with pytest.raises(ValueError, match=r"mask has shape \[3\]; expected \[36\]"):
        linear_log_probs(head.hidden, head.weight, head.labels.clamp(min=0), mask=torch.ones(3))
    with pytest.raises(ValueError, match="rows lists 1 rows, not the "):
        fused_linear_ctpo(**head.arguments(), rows=torch.tensor([0]))


def test_no_grad_and_detached_log_probs(backend: str) -> None:
    batch = random_batch(2, [20, 10, 6])
    log_probs = batch["log_probs"].clone().requires_grad_()
    with torch.no_grad():
        loss, _ = ctpo_loss(**{**batch, "log_probs": log_probs})
    assert not loss.requires_grad
    assert not ctpo_loss(**batch)[0].requires_grad
    assert ctpo_loss(**{**batch, "log_probs": log_probs})[0].requires_grad


def test_only_log_prob_is_differentiable(backend: str) -> None:
    batch = random_batch(3, [20, 10, 6])
    leaves = {name: batch[name].clone().requires_grad_() for name in ("old_log_probs", "advantages", "weights")}
    log_probs = batch["log_probs"].clone().requires_grad_()
    loss, stats, per_token = ctpo_loss(**{**batch, **leaves, "log_probs": log_probs}, return_per_token=True)
    loss.backward()
    assert all(leaf.grad is None for leaf in leaves.values())
    assert log_probs.grad.any()
    assert not stats.sums.requires_grad
    assert not per_token.loss.requires_grad


def test_double_backward_of_the_loss_is_refused(backend: str) -> None:
    batch = random_batch(4, [20, 10, 6])
    log_probs = batch["log_probs"].clone().requires_grad_()
    scale = torch.ones((), requires_grad=True)
    loss, _ = ctpo_loss(**{**batch, "log_probs": log_probs})
    (gradient,) = torch.autograd.grad(loss * scale, log_probs, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.nansum().backward()


def test_unknown_backend_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CTPO_KERNELS_BACKEND", "numpy")
    with pytest.raises(ValueError, match="CTPO_KERNELS_BACKEND: unknown backend 'numpy'; known: torch, triton"):
        loss_with()


def test_backend_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CTPO_KERNELS_BACKEND", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match="triton backend was requested"):
        loss_with()
    for other in ("torch", ""):
        monkeypatch.setenv("CTPO_KERNELS_BACKEND", other)
        loss_with()


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_triton_on_the_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    head = random_head(1, [20, 10, 6])
    with use_backend("triton"):
        with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
            loss_with()
        with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
            fused_linear_ctpo(**head.arguments())
        with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
            vocab_parallel_log_probs(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))
    assert dispatch.choose(torch.zeros(1)) == "torch"


def test_triton_refuses_float64(interpreter: None) -> None:
    with pytest.raises(RuntimeError, match="float32 and the tensors are float64"):
        ctpo_loss(**random_batch(1, [20], dtype=torch.float64))
    with pytest.raises(RuntimeError, match="float64"):
        fused_linear_ctpo(**random_head(1, [20]).double().arguments())
    with use_backend(None):
        assert dispatch.choose(torch.zeros(1, dtype=torch.float64)) == "torch"
        assert dispatch.choose(torch.zeros(1)) == "triton"
        assert dispatch.choose(torch.zeros(1, dtype=torch.bfloat16)) == "triton"


def test_triton_refuses_other_devices(interpreter: None) -> None:
    with pytest.raises(RuntimeError, match="does not support device meta"):
        dispatch.choose(torch.zeros(1, device="meta"))


def test_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with use_backend("triton"), pytest.raises(RuntimeError, match="triton is not installed"):
        loss_with()
    loss_with()


def test_interpreter_without_triton_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for the interpreter does not want the twin tested a second time."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1 asks for the interpreter, but triton is not installed"):
        loss_with()
    with use_backend("torch"):
        loss_with()


def test_plain_torch_on_a_gpu_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    dispatch._warn_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="plain torch on cuda:0.*: triton is not installed") as caught:
        for _ in range(3):
            assert dispatch._choose(torch.device("cuda:0"), torch.bfloat16) == "torch"
            assert dispatch._choose(torch.device("cuda:0"), torch.float64) == "torch"  # as its precision asks
            assert dispatch._choose(torch.device("cpu"), torch.float32) == "torch"
    assert len(caught) == 1


def test_interpreter_leaves_no_trace_in_the_environment() -> None:
    """Other tests and their child processes must not interpret kernels, nor import Triton where nothing needs it."""
    assert "TRITON_INTERPRET" not in os.environ
    code = "import sys; from ctpo_kernels import *; sys.exit('triton' in sys.modules)"
    packages = str(Path(ctpo_kernels.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": packages}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=scaled(120))


@pytest.mark.parametrize("function", [ctpo_loss, fused_linear_ctpo])
def test_both_losses_have_the_keywords_of_the_reference(function: Any) -> None:
    parameters = inspect.signature(function).parameters
    assert set(LossSpec._field_defaults) == set(LossSpec._fields)
    for name, default in LossSpec._field_defaults.items():
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default == default
