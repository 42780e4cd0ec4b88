"""Every launch that the package makes, noted instead of made: the launchers run on CPU tensors of realistic sizes."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch

from ctpo_kernels.packed import LossTensors, PackedTokens
from ctpo_kernels.rows_torch import EntropyGradient, Shard
from ctpo_kernels.spec import LossSpec, inverse_of_loss_tokens


@dataclasses.dataclass(frozen=True)
class KernelLaunch:
    """One kernel as a launcher calls it.

    module: where the kernel is. signature, constants: by argument name. divisible: arguments that are multiples of 16.
    options: what the launcher passes beside the arguments (num_warps, ...).
    """

    kernel: str
    module: str
    configuration: str
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[str, ...]
    options: dict[str, Any]

    @property
    def key(self) -> str:
        """Equal for launches that share a compiled kernel."""
        return repr((self.kernel, self.signature, self.constants, self.divisible, self.options))

    @property
    def warps(self) -> int:
        """Warps of one program."""
        return int(self.options["num_warps"])


class _Recorder:
    """Takes the place of a module of kernels and notes launches instead of making them."""

    def __init__(self, module: ModuleType, launches: list[tuple[Any, dict[str, Any]]]) -> None:
        self._module, self._launches = module, launches

    def __getattr__(self, name: str) -> _RecordedKernel:
        return _RecordedKernel(getattr(self._module, name), self._launches)


class _RecordedKernel:
    """`kernel[grid](...)` without a launch."""

    def __init__(self, kernel: Any, launches: list[tuple[Any, dict[str, Any]]]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._note

    def _note(self, *given: Any, **named: Any) -> None:
        positional = dict(zip(self._kernel.arg_names[: len(given)], given, strict=True))
        self._launches.append((self._kernel, positional | named))


@contextlib.contextmanager
def _recording() -> Iterator[list[tuple[Any, dict[str, Any]]]]:
    from ctpo_kernels import layer_kernels, layer_triton, loss_kernels, loss_triton, rows_kernels, rows_triton

    launches: list[tuple[Any, dict[str, Any]]] = []
    modules = {loss_triton: loss_kernels, rows_triton: rows_kernels, layer_triton: layer_kernels}
    for launcher, kernels in modules.items():
        vars(launcher)["kernels"] = _Recorder(kernels, launches)
    try:
        yield launches
    finally:
        for launcher, kernels in modules.items():
            vars(launcher)["kernels"] = kernels


def recorded(run: Callable[[], None], configuration: str) -> list[KernelLaunch]:
    """What `run` launches."""
    with _recording() as notes:
        run()
    return [_describe(kernel, arguments, configuration) for kernel, arguments in notes]


def _describe(kernel: Any, arguments: dict[str, Any], configuration: str) -> KernelLaunch:
    """Types and specialisation as Triton itself derives them at a launch."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    values, kinds, options = bind(**arguments)
    signature = {name: kind for name, (kind, _) in zip(values, kinds, strict=True)}
    constants = {name: values[name] for name, kind in signature.items() if kind == "constexpr"}
    keys = {name: key for name, (kind, key) in zip(values, kinds, strict=True) if kind != "constexpr"}
    divisible = tuple(name for name, key in keys.items() if key and backend.parse_attr(key))
    return KernelLaunch(kernel.__name__, kernel.fn.__module__, configuration, signature, constants, divisible, options)


_ALL_OPTIONS: dict[str, Any] = {
    "pieces": True,
    "per_token": True,
    "masked": True,
    "weights": "token",
    "advantages": "token",
    "ratio_mode": "geomean",
}
_LIMITED: dict[str, Any] = {"clip_mode": "detached_ratio", "clip_low": 1.0, "clip_high": 4.0, "clip_c": None}
# Keywords of ctpo_loss (or an argument of batch_of); names that begin with "default" are the quick ones.
_LOSSES: dict[str, dict[str, Any]] = {
    "default": {},
    "default of a limited weight": _LIMITED,
    "per-token output": {"per_token": True},
    "on-policy": {"old": False},
    "token weights, masks, advantages": {"masked": True, "weights": "token", "advantages": "token"},
    "sequence weights": {"weights": "sequence"},
    "token-mean": {"loss_agg_mode": "token-mean"},
    "token-mean, count in a tensor": {"loss_agg_mode": "token-mean", "tokens": torch.ones(())},
    "power 0": {"clip_power": 0.0},
    "power from a table": {"clip_power": 0.3},
    "geomean, power -1/2": {"ratio_mode": "geomean", "clip_power": -0.5},
    "token ratio": {"ratio_mode": "token"},
    "sequence ratio": {"ratio_mode": "sequence"},
    "sequence-geomean ratio": {"ratio_mode": "sequence-geomean"},
    "pieces of sequences": {"pieces": True},
    "pieces, all options": {**_ALL_OPTIONS, "clip_power": 0.3},
    "pieces, limited weight, all options": {**_ALL_OPTIONS, **_LIMITED},
    "sequence ratio of pieces": {"pieces": True, "ratio_mode": "sequence"},
    "int64 masks, int32 boundaries": {"masks": torch.int64, "cu": torch.int32, "masked": True},
}
# Tokens that are no multiple of 16 and aligned ones; one sequence, few, and enough for a program each.
_SIZES = {"1 sequence": (32768, 1), "8 sequences": (32771, 8), "300 sequences": (32768, 300)}


def batch_of(
    tokens: int,
    segments: int,
    *,
    old: bool = True,
    masked: bool = False,
    weights: str = "",
    advantages: str = "sequence",
    masks: torch.dtype = torch.bool,
    cu: torch.dtype = torch.int64,
) -> PackedTokens:
    values, ones = torch.zeros(tokens), torch.ones(tokens, dtype=masks)
    per = {"token": values, "sequence": torch.zeros(segments)}
    bounds = torch.linspace(0, tokens, segments + 1).to(cu)
    tensors = LossTensors(
        old_log_probs=values if old else None,
        response_mask=ones,
        advantages=per[advantages],
        cu_seqlens=bounds,
        loss_mask=ones if masked else None,
        weights=per.get(weights),
    )
    return PackedTokens.of(values, tensors)


def launch_loss(size: tuple[int, int], options: dict[str, Any], *, stream: bool = False) -> None:
    from ctpo_kernels import loss_triton

    options = dict(options)
    per_token, pieces, tokens = (options.pop(name, None) for name in ("per_token", "pieces", "tokens"))
    shape = {name: options.pop(name) for name in inspect.signature(batch_of).parameters if name in options}
    batch, spec = batch_of(*size, **shape), LossSpec(**options)
    inverse = spec.inverse_denominator(tokens, None, batch)
    totals = torch.ones(batch.segments, 4, dtype=torch.int64)
    state = torch.zeros(batch.segments, 3, dtype=torch.int64)
    if stream:
        # The head's second window of three.
        inverse = inverse_of_loss_tokens(batch) if inverse is None else inverse
        loss = loss_triton.TritonLossStream(
            batch, spec, inverse, totals=totals if spec.per_sequence else None, state=state
        )
        loss.step(8192, 16384)
        loss.finish()
    else:
        carried = (state, totals) if pieces else (None, None)
        loss_triton.loss_pass(batch, spec, inverse, per_token=bool(per_token), state=carried[0], totals=carried[1])


def launch_rows(
    columns: int,
    valid: int,
    dtype: torch.dtype,
    *,
    rows: int = 16,
    shards: int = 1,
    entropy: bool = False,
    mixed: bool = False,
    differentiable: bool = False,
) -> None:
    """The three passes over rows of logits. mixed: a bfloat16 gradient over its logits; differentiable: the entropy."""
    from ctpo_kernels import rows_triton

    shard = Shard(0, valid)
    logits = torch.zeros(rows, columns, dtype=dtype)
    labels = torch.zeros(rows, dtype=torch.int64)
    parts = rows_triton.row_stats(logits, labels, shard, 1.0, entropy=entropy)
    merged = rows_triton.merge_stats(parts.repeat(shards, 1, 1), labels, 1.0)
    out = logits.view(torch.bfloat16)[:, :columns] if mixed else logits
    g = merged.log_probs
    by_entropy = EntropyGradient(merged.entropy, g) if differentiable else None
    rows_triton.gradient_into(out, logits, merged.lse, labels, g, shard, 1.0, entropy=by_entropy)


def launch_layer(heads: int, width: int, columns: int, dtype: torch.dtype, *, rows: int = 16) -> None:
    """SwiGLU of so many columns and rotary embedding of so many heads, in both directions."""
    from ctpo_kernels import layer_triton

    x, t = torch.zeros(rows, 2 * columns, dtype=dtype), torch.zeros(rows, heads, width, dtype=dtype)
    layer_triton.swiglu_gradient(x, layer_triton.swiglu(x))
    for inverse in (False, True):
        layer_triton.rotated(t, t[:, :1, ::2], t[:, :1, ::2], inverse=inverse)


def configurations() -> dict[str, Callable[[], None]]:
    """Name -> launchers of that configuration, on CPU tensors of realistic sizes."""
    found: dict[str, Callable[[], None]] = {}
    for name, options in _LOSSES.items():
        for size in _SIZES:
            if size == "1 sequence" and name != "default":
                continue
            found[f"{name}, {size}"] = partial(launch_loss, _SIZES[size], options)
        if not options.keys() & {"pieces", "per_token"} and not options.get("ratio_mode", "").startswith("sequence"):
            found[f"{name}, streaming head"] = partial(launch_loss, _SIZES["8 sequences"], options, stream=True)
    bf16, fp32 = torch.bfloat16, torch.float32
    rows: dict[str, tuple[int, int, torch.dtype, dict[str, Any]]] = {
        "default, bf16 logits": (151936, 151936, bf16, {}),
        "default, fp32 logits, bf16 gradient over them": (151936, 151936, fp32, {"mixed": True}),
        "fp32 logits, entropy": (151936, 151936, fp32, {"entropy": True}),
        "bf16 logits, entropy, 8 shards": (18992, 18001, bf16, {"entropy": True, "shards": 8}),
        "fp32 logits, odd vocabulary": (32003, 32001, fp32, {"entropy": True, "shards": 2}),
        "bf16 gradient over fp32, odd vocabulary": (32003, 32001, fp32, {"mixed": True, "shards": 4}),
        "small vocabulary": (512, 500, fp32, {}),
        "gradient of the entropy": (151936, 151936, fp32, {"entropy": True, "mixed": True, "differentiable": True}),
    }
    for name, (columns, valid, dtype, options) in rows.items():
        found[name] = partial(launch_rows, columns, valid, dtype, **options)
    layers: dict[str, tuple[int, int, int, torch.dtype]] = {
        "default, layer in bf16": (32, 128, 9728, bf16),
        "default, layer in fp32": (32, 128, 9728, fp32),
        "one head, odd sizes": (1, 80, 1001, bf16),
        "wide heads in fp16": (8, 256, 6144, torch.float16),
    }
    for name, sizes in layers.items():
        found[name] = partial(launch_layer, *sizes)
    return found
