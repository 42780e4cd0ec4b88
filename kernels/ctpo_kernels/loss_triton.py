"""Launches the Triton kernels of the loss; the same interface as `loss_torch`."""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

import torch
from torch import Tensor

from ctpo_kernels import dispatch, loss_tile
from ctpo_kernels import loss_kernels as kernels
from ctpo_kernels.loss_torch import LossPass, empty_vector, position_scale, segment_totals
from ctpo_kernels.names import RATIO_MODES
from ctpo_kernels.packed import PackedTokens
from ctpo_kernels.spec import LossSpec
from ctpo_kernels.stats import MAXIMA, SUMS, PerToken

__all__ = ["LossStream", "loss_pass", "segment_totals"]

Form = Literal["segment", "tile"]
STATS = len(SUMS) + len(MAXIMA)

# (BLOCK, num_warps) of each form: no spills on sm_80, sm_90 and sm_100 (python -m ctpo_kernels.aot).
SEGMENT = (512, 8)
TILE = (512, 4)
MAX_REGISTERS = 128
"""A thread: ptxas spills a few bytes to reach a smaller number that it prefers unless it is told this one."""

LOOK = 256
"""Tile totals that a tile reads at a time."""

SEGMENT_FORM_FROM = 256
"""Segments from which a program for each fills the device."""

SEGMENT_FORM_TOKENS = 16384
"""Mean tokens a segment up to which one program may walk it alone."""


def choose_form(tokens: int, segments: int) -> Form:
    """The launch form by what the host knows; both give the same bits in S_t and in every decision."""
    return "segment" if segments >= SEGMENT_FORM_FROM and tokens <= segments * SEGMENT_FORM_TOKENS else "tile"


def loss_pass(
    batch: PackedTokens,
    spec: LossSpec,
    inverse: float | Tensor,
    *,
    state: Tensor | None = None,
    totals: Tensor | None = None,
    per_token: bool = False,
    form: Form | None = None,
    block: int | None = None,
) -> LossPass:
    """As `loss_torch.loss_pass`. form, block (a power of two up to 2048): the launch; None chooses."""
    device, n = batch.log_probs.device, batch.tokens
    if n == 0 or batch.segments == 0:
        details = _details(n, device) if per_token else None
        nothing = batch.log_probs.new_zeros(())
        return LossPass(nothing, torch.zeros_like(batch.log_probs), empty_vector(device), details)
    form = form or choose_form(n, batch.segments)
    tokens = _Arguments(batch, spec, inverse, state, totals, positions=None if state is not None else n)
    gradient = torch.empty_like(batch.log_probs)
    details = _details(n, device) if per_token else None
    if form == "segment":
        partials = _launch_segments(tokens, gradient, details, 0, n, block=block)
    else:
        partials = _launch_tiles(tokens, gradient, details, block=block)
    loss, vector = _reduce(partials)
    return LossPass(loss, gradient, vector, details)


class LossStream:
    """As `loss_torch.LossStream`: one launch a window."""

    def __init__(
        self, batch: PackedTokens, spec: LossSpec, inverse: float | Tensor, *, totals: Tensor | None, state: Tensor
    ) -> None:
        self._batch = batch
        self._arguments = _Arguments(batch, spec, inverse, state, totals, positions=batch.tokens)
        self._partials = empty_vector(batch.log_probs.device)[:, None].repeat(1, batch.segments)

    def step(self, start: int, end: int, log_probs: Tensor) -> Tensor:
        self._batch.log_probs[start:end] = log_probs
        gradient = torch.empty_like(log_probs)
        _launch_segments(self._arguments, gradient, None, start, end, partials=self._partials)
        return gradient

    def finish(self) -> Tensor:
        return _reduce(self._partials)[1]


class _Arguments:
    """What every launch of one batch shares. positions: bound on t where it is known without a read-back."""

    def __init__(
        self,
        batch: PackedTokens,
        spec: LossSpec,
        inverse: float | Tensor,
        state: Tensor | None,
        totals: Tensor | None,
        positions: int | None,
    ) -> None:
        none = batch.log_probs  # stands in for pointers that a kernel does not read
        self.batch = batch
        power, table = _power(spec.power, batch, positions, totals)
        if isinstance(inverse, Tensor):
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
        self.numbers = (inverse, spec.low, spec.high, spec.dual)
        self.constants: dict[str, Any] = {
            "HAS_OLD": batch.old_log_probs is not None,
            "HAS_LOSS_MASK": batch.loss_mask is not None,
            "RATIO": RATIO_MODES.index(spec.ratio),
            "POWER": power,
            "PER_SEQUENCE": spec.per_sequence,
            "ADVANTAGE_PER_TOKEN": batch.advantages.dim() == 1,
            "HAS_WEIGHTS": batch.weights is not None,
            "WEIGHT_PER_TOKEN": batch.weights is not None and batch.weights.dim() == 1,
            "HAS_STATE": state is not None,
            "HAS_TOTALS": totals is not None,
            "INVERSE_POINTER": isinstance(inverse, Tensor),
        }


def _launch_segments(
    arguments: _Arguments,
    gradient: Tensor,
    details: PerToken | None,
    start: int,
    end: int,
    *,
    partials: Tensor | None = None,
    block: int | None = None,
) -> Tensor:
    """Partial statistics `[STATS, S]`; given ones are added to, and the state advances."""
    segments, stream = arguments.batch.segments, partials is not None
    if partials is None:
        partials = gradient.new_empty(STATS, segments, dtype=torch.float64)
    dispatch.launch(
        kernels.segment_kernel,
        segments,
        *arguments.tensors,
        arguments.state,
        arguments.totals,
        gradient,
        *_outputs(details, gradient),
        partials,
        *arguments.numbers,
        segments,
        start,
        end,
        BLOCK=block or SEGMENT[0],
        num_warps=SEGMENT[1],
        maxnreg=MAX_REGISTERS,
        PER_TOKEN=details is not None,
        STREAM=stream,
        **arguments.constants,
    )
    return partials


def _launch_tiles(
    arguments: _Arguments, gradient: Tensor, details: PerToken | None, *, block: int | None = None
) -> Tensor:
    """Partial statistics `[STATS, slots]`."""
    size = block or TILE[0]
    segments, n = arguments.batch.segments, arguments.batch.tokens
    slots = n // size + segments
    totals = torch.empty(4, slots, dtype=torch.int64, device=gradient.device)
    partials = gradient.new_empty(STATS, slots, dtype=torch.float64)
    log_probs, old, model, trained, *_, cu = arguments.tensors
    dispatch.launch(
        kernels.tile_totals_kernel,
        slots,
        log_probs,
        old,
        model,
        trained,
        cu,
        totals,
        segments,
        slots,
        BLOCK=size,
        HAS_OLD=arguments.constants["HAS_OLD"],
        HAS_LOSS_MASK=arguments.constants["HAS_LOSS_MASK"],
        num_warps=TILE[1],
    )
    dispatch.launch(
        kernels.tile_kernel,
        slots,
        *arguments.tensors,
        totals,
        arguments.state,
        arguments.totals,
        gradient,
        *_outputs(details, gradient),
        partials,
        *arguments.numbers,
        segments,
        slots,
        n,
        BLOCK=size,
        LOOK=LOOK,
        num_warps=TILE[1],
        maxnreg=MAX_REGISTERS,
        PER_TOKEN=details is not None,
        **arguments.constants,
    )
    return partials


def _reduce(partials: Tensor) -> tuple[Tensor, Tensor]:
    """Loss (float32 scalar) and statistics vector."""
    loss, vector = partials.new_empty((), dtype=torch.float32), partials.new_empty(STATS)
    dispatch.launch(kernels.reduce_kernel, STATS, partials, vector, loss, partials.shape[1], BLOCK=1024, num_warps=4)
    return loss, vector


def _readable(mask: Tensor) -> Tensor:
    """The same memory in a dtype that kernels load."""
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def _outputs(details: PerToken | None, unused: Tensor) -> tuple[Tensor, ...]:
    return (unused,) * 4 if details is None else (details.loss, details.log_ratio, details.prefix, details.clip)


def _details(n: int, device: torch.device) -> PerToken:
    dtypes = (torch.float32, torch.float32, torch.int64, torch.int8)
    return PerToken(*(torch.zeros(n, dtype=dtype, device=device) for dtype in dtypes))


def _power(
    power: float, batch: PackedTokens, positions: int | None, totals: Tensor | None
) -> tuple[int, Tensor | None]:
    """Kernel constant for t^power, and a table for powers that the device would not round as the twin does."""
    known = {0.0: loss_tile.POWER_ZERO, 0.5: loss_tile.POWER_HALF, -0.5: loss_tile.POWER_MINUS_HALF}
    if power in known:
        return known[power].value, None
    if positions is None:
        # Context parallelism: pieces on other ranks come before; their tokens are in the totals (one read-back).
        positions = int(totals[:, 1].max()) if totals is not None else batch.tokens
    size = 1 << max(0, math.ceil(math.log2(max(1, positions))))
    return loss_tile.POWER_TABLE.value, _table(power, size, batch.log_probs.device)


@functools.lru_cache(maxsize=8)
def _table(power: float, size: int, device: torch.device) -> Tensor:
    return position_scale(torch.arange(1, size + 1), power, torch.float32).to(device)
