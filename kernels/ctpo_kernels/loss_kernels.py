"""Triton kernels of the loss. One program processes a span of one segment, tile by tile; integer sums carry the prefix.

A whole batch takes three launches. `span_totals_kernel` sums up every span; `loss_kernel` adds the totals of the
earlier spans and writes all results; `reduce_kernel` adds up the partial statistics of the programs. Where the loss
tokens of token-mean are not given, `count_kernel` counts them in a fourth, after the first. A window of the streaming
head takes one launch of `loss_kernel`, with a program per segment; `state` carries the prefix between windows.

Segment b owns the slots (programs, and columns of their results) from cu[b] // span + b on: enough for its spans, and
found without a table. Boundaries are clamped to the batch, because the host has not read them.
"""

import triton
import triton.language as tl

from ctpo_kernels.loss_tile import (
    CLIP_BITS,
    CLIP_MASK,
    N_SUMS,
    UNIT,
    largest_of,
    load,
    smallest_of,
    store_partials,
    tile_loss,
    to_units,
)

ALIGNMENT = tl.constexpr(16)
"""Tokens. A tile begins at a multiple of it."""

COUNTS = ["segments", "slots", "tile_bits", "window_start", "window_end", "tokens", "columns"]
"""Arguments that vary between batches: Triton would recompile for a 1 and for multiples of 16."""


@triton.jit
def _wrong(start, end, segment, tokens):
    """Whether a segment's boundaries are invalid: below 0, decreasing, beyond the last token, or not starting at 0."""
    return (start < 0) | (end < start) | (end > tokens) | ((segment == 0) & (start != 0))


@triton.jit
def _bounds(cu, segment, segments, window_start, window_end, tokens):
    """First token, end, and end of what is written for a segment in a window; whether its boundaries are invalid."""
    start = tl.load(cu + segment).to(tl.int64)
    end = tl.load(cu + segment + 1).to(tl.int64)
    wrong = _wrong(start, end, segment, tokens)
    first = tl.minimum(tl.maximum(start, window_start), window_end)
    end = tl.minimum(tl.maximum(end, first), window_end)
    # Padding belongs to the last segment, so that its gradient is written too.
    last = tl.where(segment == segments - 1, window_end, end).to(tl.int64)
    return first, end, last, wrong


@triton.jit
def _segment_of_slot(slot, cu, segments, tile_bits, BLOCK: tl.constexpr):
    lowest = tl.zeros((), tl.int32)
    highest = segments - 1
    while lowest < highest:
        middle = (lowest + highest + 1) // 2
        if ((tl.load(cu + middle) // BLOCK) >> tile_bits) + middle <= slot:
            lowest = middle
        else:
            highest = middle - 1
    return lowest


@triton.jit
def _span(slot, segment, first, last, tile_bits, BLOCK: tl.constexpr):
    """The segment's first slot; index of this span and number of spans; first (aligned) and end token of the span."""
    base = ((first // BLOCK) >> tile_bits).to(tl.int32) + segment
    aligned = first // ALIGNMENT * ALIGNMENT
    tiles = tl.full((), 1, tl.int64) << tile_bits
    spans = (((last - aligned + BLOCK - 1) // BLOCK + tiles - 1) >> tile_bits).to(tl.int32)
    # Invalid boundaries may map a slot to a segment that does not own it.
    number = tl.minimum(tl.maximum(slot - base, 0), spans)
    begin = aligned + number * tiles * BLOCK
    return base, number, spans, tl.multiple_of(begin, ALIGNMENT), tl.minimum(begin + tiles * BLOCK, last)


@triton.jit(do_not_specialize=COUNTS)
def span_totals_kernel(
    log_probs,
    old,
    response_mask,
    loss_mask,
    cu,
    span_totals,
    segments,
    slots,
    tile_bits,
    tokens,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    HAS_OLD: tl.constexpr,
    HAS_LOSS_MASK: tl.constexpr,
    WHOLE_SEQUENCE: tl.constexpr,
    COUNT_TRAINED: tl.constexpr,
):
    """Grid: slots. span_totals: int64 `[slots, 4]`: units, response tokens, NaN, loss tokens of each span.

    For a segment with a single span, only a ratio of the WHOLE_SEQUENCE needs more than the loss tokens.
    """
    slot = tl.program_id(0)
    segment = _segment_of_slot(slot, cu, segments, tile_bits, BLOCK)
    first, end, last, _wrong_boundaries = _bounds(cu, segment, segments, 0, tokens, tokens)
    _base, _number, spans, begin, stop = _span(slot, segment, first, last, tile_bits, BLOCK)
    RUNS: tl.constexpr = [BLOCK // RUN, RUN]
    offset = tl.arange(0, BLOCK)
    units_runs = tl.zeros((BLOCK // RUN,), tl.int64)
    counts_runs = tl.zeros((BLOCK // RUN,), tl.int32)
    trained_runs = tl.zeros((BLOCK // RUN,), tl.int32)
    lower, upper = (first - begin).to(tl.int32), (tl.minimum(end, stop) - begin).to(tl.int32)
    log_probs += begin
    old += begin
    response_mask += begin
    loss_mask += begin
    if spans > 1 or WHOLE_SEQUENCE:
        for start in range(0, upper, BLOCK):
            live = (offset >= lower - start) & (offset < upper - start)
            full = (start >= lower) & (start + BLOCK <= upper)
            _new, d, model, trained = load(
                log_probs + start,
                old + start,
                response_mask + start,
                loss_mask + start,
                offset,
                live,
                full,
                HAS_OLD,
                HAS_LOSS_MASK,
            )
            d, units, counts = to_units(d, model)
            units_runs += tl.sum(tl.reshape(units, RUNS), 1)
            counts_runs += tl.sum(tl.reshape(counts, RUNS), 1)
            if HAS_LOSS_MASK and COUNT_TRAINED:
                trained_runs += tl.sum(tl.reshape(trained.to(tl.int32), RUNS), 1)
        if COUNT_TRAINED and not HAS_LOSS_MASK:
            trained_runs = counts_runs & 0xFFFF
    elif COUNT_TRAINED:
        for start in range(0, upper, BLOCK):
            live = (offset >= lower - start) & (offset < upper - start)
            trained = tl.load(response_mask + start + offset, mask=live, other=0) != 0
            if HAS_LOSS_MASK:
                trained &= tl.load(loss_mask + start + offset, mask=live, other=0) != 0
            trained_runs += tl.sum(tl.reshape(trained.to(tl.int32), RUNS), 1)
    own = span_totals + slot.to(tl.int64) * 4
    tl.store(own, tl.sum(units_runs, 0))
    tl.store(own + 1, tl.sum(counts_runs & 0xFFFF, 0).to(tl.int64))
    tl.store(own + 2, tl.sum(counts_runs >> 16, 0).to(tl.int64))
    tl.store(own + 3, tl.sum(trained_runs, 0).to(tl.int64))


@triton.jit(do_not_specialize=COUNTS)
def count_kernel(span_totals, inverse, slots, BLOCK: tl.constexpr):
    """Grid: 1. inverse: float32 `[1]`, 1 over the loss tokens of all spans, of which there is at least 1."""
    trained = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        trained += tl.load(span_totals + slot.to(tl.int64) * 4 + 3, mask=slot < slots, other=0)
    tl.store(inverse, (1.0 / tl.maximum(tl.sum(trained, 0), 1).to(tl.float64)).to(tl.float32))


@triton.jit
def _totals_of_spans(
    span_totals,
    slots,
    base,
    number,
    spans,
    LOOK: tl.constexpr,
    WHOLE_SEQUENCE: tl.constexpr,
    COUNT_TRAINED: tl.constexpr,
):
    """Units, tokens and NaN of the spans before `number`, then of all, then the loss tokens of all.

    Totals that are not requested (WHOLE_SEQUENCE, COUNT_TRAINED) are 0.
    """
    units_before = tl.zeros((LOOK,), tl.int64)
    tokens_before = tl.zeros((LOOK,), tl.int32)
    bad_before = tl.zeros((LOOK,), tl.int32)
    units_total = tl.zeros((LOOK,), tl.int64)
    tokens_total = tl.zeros((LOOK,), tl.int32)
    bad_total = tl.zeros((LOOK,), tl.int32)
    trained_total = tl.zeros((LOOK,), tl.int32)
    look_to = number
    if WHOLE_SEQUENCE or COUNT_TRAINED:
        look_to = tl.minimum(spans, slots - base)
    for start in range(0, look_to, LOOK):
        other = start + tl.arange(0, LOOK)
        inside = other < look_to
        earlier = inside & (other < number)
        where = span_totals + (base + other).to(tl.int64) * 4
        units_before += tl.load(where, mask=earlier, other=0)
        tokens_before += tl.load(where + 1, mask=earlier, other=0).to(tl.int32)
        bad_before += tl.load(where + 2, mask=earlier, other=0).to(tl.int32)
        if WHOLE_SEQUENCE:
            units_total += tl.load(where, mask=inside, other=0)
            tokens_total += tl.load(where + 1, mask=inside, other=0).to(tl.int32)
            bad_total += tl.load(where + 2, mask=inside, other=0).to(tl.int32)
        if COUNT_TRAINED:
            trained_total += tl.load(where + 3, mask=inside, other=0).to(tl.int32)
    return (
        tl.sum(units_before, 0),
        tl.sum(tokens_before, 0),
        tl.sum(bad_before, 0),
        tl.sum(units_total, 0),
        tl.sum(tokens_total, 0),
        tl.sum(bad_total, 0),
        tl.sum(trained_total, 0),
    )


@triton.jit(do_not_specialize=COUNTS)
def loss_kernel(
    log_probs,
    old,
    response_mask,
    loss_mask,
    advantages,
    weights,
    table,
    cu,
    span_totals,
    state,
    totals,
    gradient,
    token_loss_out,
    log_ratio_out,
    prefix_out,
    clip_out,
    partials,
    inverse,
    low_bound,
    high_bound,
    dual_bound,
    segments,
    slots,
    tile_bits,
    window_start,
    window_end,
    tokens,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    LOOK: tl.constexpr,
    HAS_OLD: tl.constexpr,
    HAS_LOSS_MASK: tl.constexpr,
    RATIO: tl.constexpr,
    DETACHED: tl.constexpr,
    POWER: tl.constexpr,
    WHOLE_SEQUENCE: tl.constexpr,
    COUNT_TRAINED: tl.constexpr,
    PER_SEQUENCE: tl.constexpr,
    ADVANTAGE_PER_TOKEN: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    WEIGHT_PER_TOKEN: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_TOTALS: tl.constexpr,
    INVERSE_POINTER: tl.constexpr,
    STREAM: tl.constexpr,
):
    """Grid: slots; a program adds the totals of its segment's earlier spans and writes all results.

    STREAM: grid segments; the tokens `window_start : window_end` of each; advances `state`, adds to `partials`.
    """
    slot = tl.program_id(0)
    segment = slot
    if not STREAM:
        segment = _segment_of_slot(slot, cu, segments, tile_bits, BLOCK)
    first, end, last, wrong = _bounds(cu, segment, segments, window_start, window_end, tokens)
    if first < last or not STREAM:
        units_carry = tl.zeros((), tl.int64)
        tokens_carry = tl.zeros((), tl.int32)
        bad_carry = tl.zeros((), tl.int32)
        units_total = tl.zeros((), tl.int64)
        tokens_total = tl.zeros((), tl.int32)
        bad_total = tl.zeros((), tl.int32)
        trained_total = tl.zeros((), tl.int32)
        begin = tl.multiple_of(first // ALIGNMENT * ALIGNMENT, ALIGNMENT)
        stop = last
        if not STREAM:
            base, number, spans, begin, stop = _span(slot, segment, first, last, tile_bits, BLOCK)
            units_carry, tokens_carry, bad_carry, units_total, tokens_total, bad_total, trained_total = (
                _totals_of_spans(
                    span_totals,
                    slots,
                    base,
                    number,
                    spans,
                    LOOK,
                    WHOLE_SEQUENCE,
                    COUNT_TRAINED,
                )
            )
        if HAS_STATE:
            units_carry += tl.load(state + segment * 3)
            tokens_carry += tl.load(state + segment * 3 + 1).to(tl.int32)
            bad_carry += tl.load(state + segment * 3 + 2).to(tl.int32)
        if HAS_TOTALS:
            units_total = tl.load(totals + segment * 4)
            tokens_total = tl.load(totals + segment * 4 + 1).to(tl.int32)
            bad_total = tl.load(totals + segment * 4 + 2).to(tl.int32)
            trained_total = tl.load(totals + segment * 4 + 3).to(tl.int32)
        scale = tl.load(inverse) if INVERSE_POINTER else inverse
        if PER_SEQUENCE:
            scale = scale / tl.maximum(trained_total, 1).to(tl.float32)
        scale = tl.where(wrong, float("nan"), scale)

        units_before, tokens_before, bad_before = units_carry, tokens_carry, bad_carry
        clipped = tl.zeros((BLOCK // RUN,), tl.int32)
        trained_capped = tl.zeros((BLOCK // RUN,), tl.int32)
        loss = tl.zeros((BLOCK // RUN,), tl.float64)
        excess = tl.zeros((BLOCK // RUN,), tl.float64)
        squares = tl.zeros((BLOCK // RUN,), tl.float64)
        largest = tl.full((BLOCK // RUN,), float("-inf"), tl.float32)
        smallest = tl.full((BLOCK // RUN,), float("inf"), tl.float32)
        farthest = tl.zeros((BLOCK // RUN,), tl.float32)
        advantage = tl.zeros((), tl.float32)
        weight = tl.zeros((), tl.float32)
        if not ADVANTAGE_PER_TOKEN:
            advantage = tl.load(advantages + segment)
        if HAS_WEIGHTS and not WEIGHT_PER_TOKEN:
            weight = tl.load(weights + segment)
        offset = tl.arange(0, BLOCK)
        lower, stored = (first - begin).to(tl.int32), (stop - begin).to(tl.int32)
        upper = (tl.minimum(end, stop) - begin).to(tl.int32)
        for start in range(0, stored, BLOCK):
            inside = offset >= lower - start
            units_carry, counts, clipped_of, trained_of, loss_of, excess_of, squares_of, a, b, c = tile_loss(
                log_probs + begin,
                old + begin,
                response_mask + begin,
                loss_mask + begin,
                advantages + begin if ADVANTAGE_PER_TOKEN else advantages,
                weights + begin if WEIGHT_PER_TOKEN else weights,
                table,
                gradient + begin,
                token_loss_out + begin if PER_TOKEN else token_loss_out,
                log_ratio_out + begin if PER_TOKEN else log_ratio_out,
                prefix_out + begin if PER_TOKEN else prefix_out,
                clip_out + begin if PER_TOKEN else clip_out,
                start,
                inside & (offset < upper - start),
                inside & (offset < stored - start),
                (start >= lower) & (start + BLOCK <= upper),
                advantage,
                weight,
                units_carry,
                tokens_carry,
                bad_carry,
                units_total,
                tokens_total,
                bad_total,
                scale,
                low_bound,
                high_bound,
                dual_bound,
                BLOCK,
                RUN,
                HAS_OLD,
                HAS_LOSS_MASK,
                RATIO,
                DETACHED,
                POWER,
                ADVANTAGE_PER_TOKEN,
                HAS_WEIGHTS,
                WEIGHT_PER_TOKEN,
                PER_TOKEN,
            )
            tokens_carry += counts & 0xFFFF
            bad_carry += counts >> 16
            clipped += clipped_of
            trained_capped += trained_of
            loss += loss_of.to(tl.float64)
            excess += excess_of.to(tl.float64)
            squares += squares_of.to(tl.float64)
            largest = tl.maximum(largest, a)
            smallest = tl.minimum(smallest, b)
            farthest = tl.maximum(farthest, c)

        if STREAM:
            tl.store(state + segment * 3, units_carry)
            tl.store(state + segment * 3 + 1, tokens_carry.to(tl.int64))
            tl.store(state + segment * 3 + 2, bad_carry.to(tl.int64))
        minus_d = -(units_carry - units_before).to(tl.float64) * UNIT
        minus_d = tl.where(bad_carry > bad_before, float("nan"), minus_d)
        excess_sum = tl.sum(excess, 0)
        unknown = excess_sum != excess_sum
        store_partials(
            partials,
            slots,
            slot,
            tl.sum(loss, 0) * scale,
            tl.sum(trained_capped & 0xFFFF, 0),
            tokens_carry - tokens_before,
            minus_d,
            excess_sum,
            tl.sum(squares, 0),
            tl.sum(clipped & CLIP_MASK, 0),
            tl.sum((clipped >> CLIP_BITS) & CLIP_MASK, 0),
            tl.sum(clipped >> CLIP_BITS >> CLIP_BITS, 0),
            tl.sum(trained_capped >> 16, 0),
            tl.where(unknown, float("inf"), largest_of(largest)),
            tl.where(unknown, float("inf"), -smallest_of(smallest)),
            tl.where(tokens_carry > tokens_before, largest_of(farthest), float("-inf")),
            STREAM,
        )


@triton.jit(do_not_specialize=COUNTS)
def reduce_kernel(partials, cu, out, loss, segments, tokens, columns, BLOCK: tl.constexpr):
    """Grid: sums and maxima. out float64 from partials `[grid, columns]`; a NaN survives in the maxima.

    The first sum is the loss, which is also written to `loss` in its dtype. It is NaN if any boundary is invalid.
    """
    row = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float64)
    top = tl.full((BLOCK,), float("-inf"), tl.float64)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        where = partials + row.to(tl.int64) * columns + column
        total += tl.load(where, mask=inside, other=0.0)
        value = tl.load(where, mask=inside, other=float("-inf"))
        top = tl.maximum(top, tl.where(value != value, float("inf"), value))
    largest = tl.max(top, 0)
    largest = tl.where(largest == float("inf"), float("nan"), largest)
    result = tl.where(row < N_SUMS, tl.sum(total, 0), largest)
    if row == 0:
        wrong = tl.zeros((BLOCK,), tl.int32)
        for start in range(0, segments, BLOCK):
            segment = start + tl.arange(0, BLOCK)
            inside = segment < segments
            begin = tl.load(cu + segment, mask=inside, other=0).to(tl.int64)
            end = tl.load(cu + segment + 1, mask=inside, other=0).to(tl.int64)
            wrong |= (_wrong(begin, end, segment, tokens) & inside).to(tl.int32)
        result = tl.where(tl.max(wrong, 0) > 0, float("nan"), result)
        tl.store(loss, result.to(loss.dtype.element_ty))
    tl.store(out + row, result)
