"""Launches the Triton kernels of the loss; the same interface as `loss_torch`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ctpo_kernels import dispatch, loss_tile
from ctpo_kernels import loss_kernels as kernels
from ctpo_kernels.loss_torch import LossPass, empty_vector, position_scale, segment_totals
from ctpo_kernels.names import RATIO_MODES
from ctpo_kernels.packed import PackedTokens
from ctpo_kernels.spec import LossSpec
from ctpo_kernels.stats import MAXIMA, SUMS, PerToken

__all__ = ["TritonLossStream", "loss_pass", "segment_totals"]

STATS = len(SUMS) + len(MAXIMA)

BLOCK, RUN, WARPS = 128, 4, 1
"""A program is one warp, so that scans and sums need no barrier; each of its threads owns RUN adjacent tokens."""

OPTIONS = {"num_warps": WARPS, "maxnreg": 128}
"""maxnreg: without a limit, ptxas prefers a smaller number of registers and spills a few bytes."""

LOOK, COUNTED = 128, 1024
"""Spans whose totals a program reads at a time; and the one program that counts the loss tokens of all."""

PROGRAMS = 2048
"""Spans that a long enough batch is cut into: enough to fill the largest device."""

SPANS = (512, 8192)
"""Tokens of the shortest and the longest span; also of the longest window. A program's counts must fit into 10 bits."""


def choose_span(tokens: int) -> int:
    """Tokens of one program: a power of two. S_t and every decision have the same bits for each."""
    shortest, longest = SPANS
    return max(shortest, min(longest, 1 << ((tokens - 1) // PROGRAMS).bit_length()))


def loss_pass(
    batch: PackedTokens,
    spec: LossSpec,
    inverse: float | Tensor | None,
    *,
    state: Tensor | None = None,
    totals: Tensor | None = None,
    positions: int | None = None,
    per_token: bool = False,
    span: int | None = None,
    block: int = BLOCK,
) -> LossPass:
    """As `loss_torch.loss_pass`. span, block: tokens of a program and of its tiles, powers of two; None: automatic."""
    device, n = batch.log_probs.device, batch.tokens
    if n == 0 or batch.segments == 0:
        details = _details(n, device) if per_token else None
        nothing = batch.log_probs.new_zeros(())
        return LossPass(nothing, torch.zeros_like(batch.log_probs), empty_vector(device), details)
    arguments = _Arguments(batch, spec, inverse, state, totals, positions=positions or n)
    gradient = torch.empty_like(batch.log_probs)
    details = _details(n, device) if per_token else None
    partials = _launch_spans(arguments, gradient, details, max(span or choose_span(n), block), block)
    loss, vector = _reduce(partials, batch)
    return LossPass(loss, gradient, vector, details)


class TritonLossStream:
    """As `loss_torch.TorchLossStream`, with one launch per window."""

    def __init__(
        self, batch: PackedTokens, spec: LossSpec, inverse: float | Tensor, *, totals: Tensor | None, state: Tensor
    ) -> None:
        self._batch = batch
        self._arguments = _Arguments(batch, spec, inverse, state, totals, positions=batch.tokens)
        self._gradient = torch.empty_like(batch.log_probs)
        self._partials = empty_vector(batch.log_probs.device)[:, None].repeat(1, batch.segments)

    def step(self, start: int, end: int) -> Tensor:
        for first in range(start, end, SPANS[1]):
            _launch_window(self._arguments, self._gradient, self._partials, first, min(first + SPANS[1], end))
        return self._gradient[start:end]

    def finish(self) -> Tensor:
        return _reduce(self._partials, self._batch)[1]


class _Arguments:
    """The arguments that all launches of one batch share. positions: as `loss_torch.loss_pass`."""

    def __init__(
        self,
        batch: PackedTokens,
        spec: LossSpec,
        inverse: float | Tensor | None,
        state: Tensor | None,
        totals: Tensor | None,
        positions: int,
    ) -> None:
        batch = batch.aligned()
        none = batch.log_probs  # stands in for pointers that a kernel does not read
        self.batch = batch
        bounds = spec.bounds
        power, table = _power(bounds.power, positions, batch.log_probs.device)
        self.counts_loss_tokens = inverse is None
        if inverse is None:
            inverse = torch.empty(1, dtype=torch.float32, device=batch.log_probs.device)  # for `count_kernel`
        elif isinstance(inverse, Tensor):
            inverse = inverse.to(torch.float32).reshape(1)
        self.tensors = (
            batch.log_probs,
            none if batch.old_log_probs is None else batch.old_log_probs,
            _readable(batch.response_mask),
            none if batch.loss_mask is None else _readable(batch.loss_mask),
            batch.advantages,
            none if batch.weights is None else batch.weights,
            none if table is None else table,
            batch.cu_seqlens,
        )
        self.state = none if state is None else state
        self.totals = none if totals is None else totals.contiguous()
        self.numbers = (inverse, bounds.low, bounds.high, bounds.dual)
        self.constants: dict[str, Any] = {
            "HAS_OLD": batch.old_log_probs is not None,
            "HAS_LOSS_MASK": batch.loss_mask is not None,
            "RATIO": RATIO_MODES.index(spec.ratio_mode),
            "DETACHED": spec.detached,
            "POWER": power,
            "WHOLE_SEQUENCE": spec.whole_sequence and totals is None,
            "COUNT_TRAINED": spec.per_sequence and totals is None,
            "PER_SEQUENCE": spec.per_sequence,
            "ADVANTAGE_PER_TOKEN": batch.advantages.dim() == 1,
            "HAS_WEIGHTS": batch.weights is not None,
            "WEIGHT_PER_TOKEN": batch.weights is not None and batch.weights.dim() == 1,
            "HAS_STATE": state is not None,
            "HAS_TOTALS": totals is not None,
            "INVERSE_POINTER": isinstance(inverse, Tensor),
        }


def _launch_spans(arguments: _Arguments, gradient: Tensor, details: PerToken | None, span: int, block: int) -> Tensor:
    """Partial statistics `[STATS, slots]` of a whole batch."""
    segments, n = arguments.batch.segments, arguments.batch.tokens
    slots, tile_bits = n // span + segments, (span // block).bit_length() - 1
    span_totals = torch.empty(slots, 4, dtype=torch.int64, device=gradient.device)
    partials = gradient.new_empty(STATS, slots, dtype=torch.float64)
    log_probs, old, model, trained, *_, cu = arguments.tensors
    dispatch.launch(
        kernels.span_totals_kernel,
        slots,
        log_probs,
        old,
        model,
        trained,
        cu,
        span_totals,
        segments,
        slots,
        tile_bits,
        n,
        BLOCK=block,
        RUN=RUN,
        HAS_OLD=arguments.constants["HAS_OLD"],
        HAS_LOSS_MASK=arguments.constants["HAS_LOSS_MASK"],
        WHOLE_SEQUENCE=arguments.constants["WHOLE_SEQUENCE"],
        COUNT_TRAINED=arguments.constants["COUNT_TRAINED"] or arguments.counts_loss_tokens,
        **OPTIONS,
    )
    if arguments.counts_loss_tokens:
        dispatch.launch(kernels.count_kernel, 1, span_totals, arguments.numbers[0], slots, BLOCK=COUNTED, num_warps=4)
    dispatch.launch(
        kernels.loss_kernel,
        slots,
        *arguments.tensors,
        span_totals,
        arguments.state,
        arguments.totals,
        gradient,
        *_outputs(details, gradient),
        partials,
        *arguments.numbers,
        segments,
        slots,
        tile_bits,
        0,
        n,
        n,
        BLOCK=block,
        RUN=RUN,
        LOOK=LOOK,
        PER_TOKEN=details is not None,
        STREAM=False,
        **arguments.constants,
        **OPTIONS,
    )
    return partials


def _launch_window(arguments: _Arguments, gradient: Tensor, partials: Tensor, start: int, end: int) -> None:
    """Process the tokens `start : end` of every segment: add their statistics to `partials` and advance the state."""
    segments, none = arguments.batch.segments, gradient
    dispatch.launch(
        kernels.loss_kernel,
        segments,
        *arguments.tensors,
        none,
        arguments.state,
        arguments.totals,
        gradient,
        *_outputs(None, gradient),
        partials,
        *arguments.numbers,
        segments,
        segments,
        0,
        start,
        end,
        arguments.batch.tokens,
        BLOCK=BLOCK,
        RUN=RUN,
        LOOK=LOOK,
        PER_TOKEN=False,
        STREAM=True,
        **arguments.constants,
        **OPTIONS,
    )


def _reduce(partials: Tensor, batch: PackedTokens) -> tuple[Tensor, Tensor]:
    """Loss (float32 scalar) and statistics vector."""
    loss, vector = partials.new_empty((), dtype=torch.float32), partials.new_empty(STATS)
    dispatch.launch(
        kernels.reduce_kernel,
        STATS,
        partials,
        batch.cu_seqlens,
        vector,
        loss,
        batch.segments,
        batch.tokens,
        partials.shape[1],
        BLOCK=1024,
        num_warps=4,
    )
    return loss, vector


def _readable(mask: Tensor) -> Tensor:
    """The same memory as a dtype that kernels can load."""
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def _outputs(details: PerToken | None, unused: Tensor) -> tuple[Tensor, ...]:
    return (unused,) * 4 if details is None else (details.loss, details.log_ratio, details.prefix, details.clip)


def _details(n: int, device: torch.device) -> PerToken:
    dtypes = (torch.float32, torch.float32, torch.int64, torch.int8)
    return PerToken(*(torch.zeros(n, dtype=dtype, device=device) for dtype in dtypes))


def _power(power: float, positions: int, device: torch.device) -> tuple[int, Tensor | None]:
    """Kernel constant for t^power; also a float32 table `[positions]` for powers that a kernel would round differently.

    Each call that needs the table computes it on the device, in float64: nothing is copied from the host or cached, so
    a CUDA graph can capture it.
    """
    known = {0.0: loss_tile.POWER_ZERO, 0.5: loss_tile.POWER_HALF, -0.5: loss_tile.POWER_MINUS_HALF}
    if power in known:
        return known[power].value, None
    table = position_scale(torch.arange(1, max(1, positions) + 1, device=device), power, torch.float32)
    return loss_tile.POWER_TABLE.value, table
