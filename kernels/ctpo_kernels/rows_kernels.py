"""Triton kernels over rows of logits: softmax statistics, their merge over vocabulary shards, the gradient."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
IGNORED_LABEL = tl.constexpr(-100)
COUNTS = ["rows"]
"""Varies between batches: Triton would recompile for a 1 and for multiples of 16."""

PER_ROW = ["labels", "parts", "log_probs", "lse", "entropy", "g", "entropy_g"]
"""One or four values per row, in slices with any offset: Triton would recompile for unaligned addresses."""


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=PER_ROW)
def row_stats_kernel(
    logits,
    row_stride,
    labels,
    parts,
    first_column,
    valid_columns,
    inverse_temperature,
    BLOCK: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """Grid: rows. parts `[C, 4]` as `rows_torch` describes them.

    Reads the row once: the sums are rescaled whenever a block has a new maximum.
    """
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * row_stride
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    weighted = tl.zeros((), tl.float32)
    for start in range(0, valid_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(base + column, mask=column < valid_columns, other=float("-inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, 0))
        # If everything so far is -inf, shift by 0 to avoid inf - inf.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        moved = tl.where(top == float("-inf"), 0.0, (top - shift) * inverse_temperature)
        keep = tl.where(top == float("-inf"), 0.0, tl.exp2(moved * LOG2E))
        away = (x - shift) * inverse_temperature
        e = tl.exp2(away * LOG2E)
        if ENTROPY:
            weighted = keep * (weighted + moved * total)
            weighted += tl.sum(e * tl.where(e == 0.0, 0.0, away), 0)
        total = total * keep + tl.sum(e, 0)
        top = new_top
    label = tl.load(labels + row) - first_column
    owned = (label >= 0) & (label < valid_columns)
    target = tl.load(base + tl.where(owned, label, 0), mask=owned, other=float("nan")).to(tl.float32)
    tl.store(parts + row * 4, top)
    tl.store(parts + row * 4 + 1, total)
    tl.store(parts + row * 4 + 2, (target - tl.where(top == float("-inf"), 0.0, top)) * inverse_temperature)
    tl.store(parts + row * 4 + 3, weighted)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=PER_ROW)
def merge_kernel(
    parts, labels, log_probs, lse, entropy, rows, inverse_temperature, SHARDS: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid: blocks of rows. parts `[SHARDS, C, 4]` -> log-prob, lse, entropy, adding the shards in rank order."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = row < rows
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    for shard in tl.static_range(SHARDS):
        largest = tl.load(parts + (shard * rows + row) * 4, mask=live, other=0.0)
        # A NaN must win: comparisons with it are false.
        top = tl.where((largest > top) | (largest != largest), largest, top)
    shift = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    target = tl.full((BLOCK,), float("nan"), tl.float32)
    for shard in tl.static_range(SHARDS):
        base = parts + (shard * rows + row) * 4
        largest = tl.load(base, mask=live, other=0.0)
        sums = tl.load(base + 1, mask=live, other=1.0)
        own = tl.load(base + 2, mask=live, other=0.0)
        around = tl.load(base + 3, mask=live, other=0.0)
        away = (largest - shift) * inverse_temperature
        factor = tl.exp2(away * LOG2E)
        apart = tl.where(factor == 0.0, 0.0, away)
        total += sums * factor
        weighted += factor * (around + apart * sums)
        target = tl.where(own == own, own + away, target)
    log_total = tl.log(total)
    label = tl.load(labels + row, mask=live, other=0)
    found = target - log_total
    tl.store(log_probs + row, tl.where(label == IGNORED_LABEL, 0.0, found), mask=live)
    tl.store(lse + row, shift * inverse_temperature + log_total, mask=live)
    tl.store(entropy + row, log_total - weighted / total, mask=live)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=PER_ROW)
def gradient_kernel(
    logits,
    logits_stride,
    out,
    out_stride,
    labels,
    lse,
    g,
    first_column,
    valid_columns,
    columns,
    inverse_temperature,
    entropy,
    entropy_g,
    BLOCK: tl.constexpr,
    OVERLAPPING: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    """Grid: rows. out = (onehot(label) - softmax(z)) g / T, zero in padding columns.

    ENTROPY: adds -p (log p + entropy) entropy_g / T. OVERLAPPING: out shares its memory with the logits in a narrower
    dtype, and each row begins where its logits begin. A block is read before any thread writes, and a write never
    reaches logits that are read later.
    """
    row = tl.program_id(0).to(tl.int64)
    source = logits + row * logits_stride
    target = out + row * out_stride
    coefficient = tl.load(g + row).to(tl.float32) * inverse_temperature
    shift = tl.load(lse + row)
    label = tl.load(labels + row) - first_column
    idle = coefficient == 0.0
    if ENTROPY:
        spread = tl.load(entropy_g + row).to(tl.float32) * inverse_temperature
        own_entropy = tl.load(entropy + row)
        idle = idle & (spread == 0.0)
    if idle:
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            tl.store(target + column, tl.zeros((BLOCK,), out.dtype.element_ty), mask=column < columns)
    else:
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            z = tl.load(source + column, mask=column < valid_columns, other=float("-inf")).to(tl.float32)
            log_p = z * inverse_temperature - shift
            p = tl.exp2(log_p * LOG2E)
            p = tl.where(column < valid_columns, p, 0.0)
            dz = coefficient * (tl.where(column == label, 1.0, 0.0) - p)
            if ENTROPY:
                dz -= spread * p * (tl.where(p == 0.0, 0.0, log_p) + own_entropy)
            dz = tl.where(column < valid_columns, dz, 0.0)
            if OVERLAPPING:
                tl.debug_barrier()
            tl.store(target + column, dz.to(out.dtype.element_ty), mask=column < columns)
