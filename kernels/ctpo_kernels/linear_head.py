"""The output layer in chunks of rows: logits exist for one chunk at a time, in float32, and never for all tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ctpo_kernels import dispatch, rows_torch
from ctpo_kernels import labels as arguments
from ctpo_kernels.chunks import CHUNK_BYTES, rows_within
from ctpo_kernels.logprob import merge
from ctpo_kernels.rows_torch import EntropyGradient, Merged
from ctpo_kernels.tiles import Runs


class HeadOptions(NamedTuple):
    """How an output layer is computed: the keywords of `linear_log_probs`, checked.

    group: None for one rank. vocab_size, chunk_size: None for all columns, and for the default. entropy_gradient:
    whether a gradient of entropies will be requested.
    """

    group: dist.ProcessGroup | None
    temperature: float
    vocab_size: int | None
    chunk_size: int | None
    product_dtype: torch.dtype
    entropy_gradient: bool = False


class LinearHead:
    """Chunked logits of `rows` hidden states, and the two gradients, for this rank's vocabulary shard.

    hidden: `[M, H]`. weight: `[V / tp, H]`. labels: `[M]`. Logits come from operands in `product_dtype` with float32
    accumulation and stay float32 (float64 operands: float64).
    """

    def __init__(self, hidden: Tensor, weight: Tensor, labels: Tensor, options: HeadOptions) -> None:
        hidden, weight = hidden.to(options.product_dtype), weight.to(options.product_dtype)
        self.hidden, self.labels, self.group = hidden, labels, options.group
        self.temperature = options.temperature
        self.shard = arguments.shard_of(weight.shape[0], options.vocab_size, options.group)
        self.dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        self.triton = dispatch.choose(hidden) == "triton"
        columns = weight.shape[0]
        rows = options.chunk_size or rows_within(CHUNK_BYTES.get(hidden.device.type, CHUNK_BYTES["cuda"]), columns)
        self.chunk_size = min(rows, max(1, hidden.shape[0]))
        self._buffer = hidden.new_empty(self.chunk_size, columns, dtype=self.dtype)
        # CUDA multiplies low-precision operands into float32; elsewhere one float32 copy of the weight serves.
        self._mixed = hidden.dtype != self.dtype and hidden.is_cuda
        self._operand = weight if self._mixed else weight.to(self.dtype)
        self._parts: Tensor | None = None
        # The torch backend's statistics overwrite the logits with exponentials, from which only the plain gradient
        # follows.
        self._keep_logits = not self.triton and options.entropy_gradient

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Row ranges in order."""
        for start in range(0, self.hidden.shape[0], self.chunk_size):
            yield start, min(start + self.chunk_size, self.hidden.shape[0])

    def log_probs(self, start: int, end: int, out: Tensor | None = None, *, entropy: bool = False) -> Merged:
        """Log-probs of the rows `start : end`, written to `out` if given; their logits stay in the buffer."""
        logits, labels = self._logits(start, end), self.labels[start:end]
        if self.triton:
            from ctpo_kernels import rows_triton

            row_stats = rows_triton.row_stats
        else:
            row_stats = rows_torch.row_stats
            logits = logits.clone() if self._keep_logits else logits
        parts = row_stats(logits, labels, self.shard, self.temperature, entropy=entropy)
        self._parts = parts
        return merge(arguments.gather_parts(parts, self.group), labels, self.temperature, out)

    def gradient_rows(
        self, start: int, end: int, merged: Merged, g: Tensor, entropy: EntropyGradient | None = None
    ) -> Tensor:
        """d (sum g log_probs) / d logits of the rows of the last call of `log_probs`, for `accumulate`.

        entropy: also add the gradient of sum g entropy, with its own g; needs `entropy_gradient`.
        """
        if self.triton or self._keep_logits:
            return self._gradient(start, end, merged.lse, g, entropy)
        logits, labels = self._buffer[: end - start], self.labels[start:end]
        assert self._parts is not None  # `log_probs` came first
        return rows_torch.gradient_after_stats(logits, self._parts, merged, labels, g, self.shard, self.temperature)

    def recomputed_gradient_rows(
        self, start: int, end: int, lse: Tensor, g: Tensor, entropy: EntropyGradient | None = None
    ) -> Tensor:
        """Return the same for rows whose logits were overwritten and whose lse `[end - start]` was kept."""
        self._logits(start, end)
        return self._gradient(start, end, lse, g, entropy)

    def _gradient(self, start: int, end: int, lse: Tensor, g: Tensor, entropy: EntropyGradient | None) -> Tensor:
        """The gradient from the logits in the buffer, which it overwrites."""
        logits, labels = self._buffer[: end - start], self.labels[start:end]
        own = (lse, labels, g, self.shard, self.temperature)
        if not self.triton:
            return rows_torch.gradient(logits, *own, entropy=entropy)
        from ctpo_kernels import rows_triton

        # Low-precision gradients are written to the first half of each row of logits: no second buffer.
        out = logits.view(self.hidden.dtype)[:, : logits.shape[1]] if self._mixed else logits
        rows_triton.gradient_into(out, logits, *own, entropy=entropy)
        return out

    def _logits(self, start: int, end: int) -> Tensor:
        x, out = self.hidden[start:end], self._buffer[: end - start]
        if self._mixed:
            return torch.mm(x, self._operand.t(), out_dtype=self.dtype, out=out)
        return torch.mm(x.to(self.dtype), self._operand.t(), out=out)

    def accumulate(self, dz: Tensor, start: int, d_hidden: Tensor | None, d_weight: Tensor | None, runs: Runs) -> None:
        """d_hidden[rows] = dz W (written), d_weight += dz^T x; dz `[C, V / tp]` belongs to the rows starting at
        `start`.

        runs: the rows of dz that are not zero.
        """
        for first, last in runs:
            part, x = dz[first:last], self.hidden[start + first : start + last]
            if d_hidden is not None:
                target = d_hidden[start + first : start + last]
                if part.dtype == self._operand.dtype == target.dtype == self.dtype:
                    torch.mm(part, self._operand, out=target)
                elif self._mixed and part.dtype == self._operand.dtype:
                    # With a low-precision output, cuBLAS may also add the partial sums of split-K in low precision.
                    target.copy_(torch.mm(part, self._operand, out_dtype=self.dtype))
                else:
                    target.copy_(part @ self._operand.to(part.dtype))
            if d_weight is not None:
                _add_outer(d_weight, part, x)


def leave_out(g: Tensor, d_hidden: Tensor | None, d_weight: Tensor | None) -> None:
    """Gradients of rows that the products skip: zero, or NaN where g `[C]` is NaN, which must stay visible."""
    nothing = g - g  # +0 where g is finite
    if d_hidden is not None:
        d_hidden.copy_(nothing[:, None])
    if d_weight is not None:
        d_weight[:1].add_(nothing.sum())


def _add_outer(total: Tensor, dz: Tensor, x: Tensor) -> None:
    """total += dz^T x, accumulated in total's dtype."""
    if dz.dtype == x.dtype == total.dtype:
        total.addmm_(dz.t(), x)
    elif dz.is_cuda and dz.dtype == x.dtype and total.dtype == torch.float32:
        torch.addmm(total, dz.t(), x, out_dtype=torch.float32, out=total)
    else:
        total.add_(dz.t() @ x.to(dz.dtype))
