"""Triton kernels of the loss. One program works on tiles of one segment; integer sums carry the prefix between tiles.

Two launch forms: `segment_kernel`, a program per segment with a running carry (many segments, and the windows of the
streaming head), and `tile_totals_kernel` + `tile_kernel`, a program per tile (few or long segments). `reduce_kernel`
adds up what the programs report.
"""

import triton
import triton.language as tl

from ctpo_kernels.loss_tile import N_SUMS, SEQUENCE, masks, store_partials, tile_loss, token


@triton.jit
def _inverse(inverse, IS_POINTER: tl.constexpr):
    if IS_POINTER:
        return tl.load(inverse)
    else:
        return inverse


@triton.jit
def _segment_of_slot(slot, cu, segments, BLOCK: tl.constexpr):
    """Segment b owns the slots from cu[b] // BLOCK + b on: enough for its tiles, and no table is needed to find it."""
    lowest = tl.zeros((), tl.int32)
    highest = segments - 1
    while lowest < highest:
        middle = (lowest + highest + 1) // 2
        if tl.load(cu + middle) // BLOCK + middle <= slot:
            lowest = middle
        else:
            highest = middle - 1
    return lowest


@triton.jit
def tile_totals_kernel(
    log_probs,
    old,
    response_mask,
    loss_mask,
    cu,
    totals,
    segments,
    slots,
    BLOCK: tl.constexpr,
    HAS_OLD: tl.constexpr,
    HAS_LOSS_MASK: tl.constexpr,
):
    """Grid: slots. totals: int64 `[4, slots]`: units, response tokens, NaN, loss tokens of each tile."""
    slot = tl.program_id(0)
    segment = _segment_of_slot(slot, cu, segments, BLOCK)
    first = tl.load(cu + segment).to(tl.int64)
    index = first + (slot - (first // BLOCK + segment)) * BLOCK + tl.arange(0, BLOCK)
    live = index < tl.load(cu + segment + 1)
    _, units, bad, model, trained = token(log_probs, old, response_mask, loss_mask, index, live, HAS_OLD, HAS_LOSS_MASK)
    tl.store(totals + slot, tl.sum(units, 0))
    tl.store(totals + slots + slot, tl.sum(model.to(tl.int32), 0).to(tl.int64))
    tl.store(totals + 2 * slots + slot, tl.sum(bad.to(tl.int32), 0).to(tl.int64))
    tl.store(totals + 3 * slots + slot, tl.sum(trained.to(tl.int32), 0).to(tl.int64))


@triton.jit
def tile_kernel(
    log_probs,
    old,
    response_mask,
    loss_mask,
    advantages,
    weights,
    table,
    cu,
    tile_totals,
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
    tokens_in_all,
    BLOCK: tl.constexpr,
    LOOK: tl.constexpr,
    HAS_OLD: tl.constexpr,
    HAS_LOSS_MASK: tl.constexpr,
    RATIO: tl.constexpr,
    POWER: tl.constexpr,
    PER_SEQUENCE: tl.constexpr,
    ADVANTAGE_PER_TOKEN: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    WEIGHT_PER_TOKEN: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_TOTALS: tl.constexpr,
    INVERSE_POINTER: tl.constexpr,
):
    """Grid: slots. A tile adds the totals of its segment's earlier tiles (LOOK at a time) and emits everything."""
    slot = tl.program_id(0)
    segment = _segment_of_slot(slot, cu, segments, BLOCK)
    first = tl.load(cu + segment).to(tl.int64)
    end = tl.load(cu + segment + 1).to(tl.int64)
    # Padding goes with the last segment, so that its gradient is written too.
    last = tl.where(segment == segments - 1, tokens_in_all, end)
    base = (first // BLOCK + segment).to(tl.int32)
    tile = slot - base
    tiles = ((last - first + BLOCK - 1) // BLOCK).to(tl.int32)

    units_before = tl.zeros((), tl.int64)
    tokens_before = tl.zeros((), tl.int64)
    bad_before = tl.zeros((), tl.int64)
    units_total = tl.zeros((), tl.int64)
    tokens_total = tl.zeros((), tl.int64)
    bad_total = tl.zeros((), tl.int64)
    trained_total = tl.zeros((), tl.int64)
    look_to = tile
    if (PER_SEQUENCE or RATIO >= SEQUENCE) and not HAS_TOTALS:
        look_to = tiles
    for start in range(0, look_to, LOOK):
        other = start + tl.arange(0, LOOK)
        inside = other < look_to
        earlier = other < tile
        where = tile_totals + base + other
        units = tl.load(where, mask=inside, other=0)
        tokens = tl.load(where + slots, mask=inside, other=0)
        bad = tl.load(where + 2 * slots, mask=inside, other=0)
        units_before += tl.sum(tl.where(earlier, units, 0), 0)
        tokens_before += tl.sum(tl.where(earlier, tokens, 0), 0)
        bad_before += tl.sum(tl.where(earlier, bad, 0), 0)
        if RATIO >= SEQUENCE:
            units_total += tl.sum(units, 0)
            tokens_total += tl.sum(tokens, 0)
            bad_total += tl.sum(bad, 0)
        if PER_SEQUENCE:
            trained_total += tl.sum(tl.load(where + 3 * slots, mask=inside, other=0), 0)
    if HAS_STATE:
        units_before += tl.load(state + segment * 3)
        tokens_before += tl.load(state + segment * 3 + 1)
        bad_before += tl.load(state + segment * 3 + 2)
    if HAS_TOTALS:
        units_total = tl.load(totals + segment * 4)
        tokens_total = tl.load(totals + segment * 4 + 1)
        bad_total = tl.load(totals + segment * 4 + 2)
        trained_total = tl.load(totals + segment * 4 + 3)
    scale = _inverse(inverse, INVERSE_POINTER)
    if PER_SEQUENCE:
        scale = scale / tl.maximum(trained_total, 1).to(tl.float32)

    index = first + tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = index < end
    units, tokens, bad, counts, loss, excess, squares, largest, smallest, farthest = tile_loss(
        log_probs,
        old,
        response_mask,
        loss_mask,
        advantages,
        weights,
        table,
        gradient,
        token_loss_out,
        log_ratio_out,
        prefix_out,
        clip_out,
        index,
        index,
        live,
        index < last,
        segment,
        units_before,
        tokens_before,
        bad_before,
        units_total,
        tokens_total,
        bad_total,
        scale,
        low_bound,
        high_bound,
        dual_bound,
        HAS_OLD,
        HAS_LOSS_MASK,
        RATIO,
        POWER,
        ADVANTAGE_PER_TOKEN,
        HAS_WEIGHTS,
        WEIGHT_PER_TOKEN,
        PER_TOKEN,
    )
    store_partials(
        partials,
        slots,
        slot,
        loss.to(tl.float64) * scale,
        tokens,
        units,
        bad,
        counts & 0xFFF,
        (counts >> 12) & 0xFFF,
        (counts >> 24) & 0xFFF,
        (counts >> 36) & 0xFFF,
        (counts >> 48) & 0xFFF,
        excess,
        squares,
        largest,
        smallest,
        farthest,
        False,
    )


@triton.jit
def segment_kernel(
    log_probs,
    old,
    response_mask,
    loss_mask,
    advantages,
    weights,
    table,
    cu,
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
    window_start,
    window_end,
    BLOCK: tl.constexpr,
    HAS_OLD: tl.constexpr,
    HAS_LOSS_MASK: tl.constexpr,
    RATIO: tl.constexpr,
    POWER: tl.constexpr,
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
    """Grid: segments. Tokens `window_start : window_end` of each; STREAM: advance `state`, add to `partials`.

    Outputs begin at the window's start.
    """
    segment = tl.program_id(0)
    first = tl.maximum(tl.load(cu + segment).to(tl.int64), window_start)
    end = tl.minimum(tl.load(cu + segment + 1).to(tl.int64), window_end)
    # Padding goes with the last segment, so that its gradient is written too.
    last = tl.where(segment == segments - 1, window_end, end)
    if first < last or not STREAM:
        units_total = tl.zeros((), tl.int64)
        tokens_total = tl.zeros((), tl.int64)
        bad_total = tl.zeros((), tl.int64)
        trained_total = tl.zeros((), tl.int64)
        if HAS_TOTALS:
            units_total = tl.load(totals + segment * 4)
            tokens_total = tl.load(totals + segment * 4 + 1)
            bad_total = tl.load(totals + segment * 4 + 2)
            trained_total = tl.load(totals + segment * 4 + 3)
        elif RATIO >= SEQUENCE:
            for start in range(first, end, BLOCK):
                index = start + tl.arange(0, BLOCK)
                live = index < end
                _, units, bad, model, trained = token(
                    log_probs, old, response_mask, loss_mask, index, live, HAS_OLD, HAS_LOSS_MASK
                )
                units_total += tl.sum(units, 0)
                tokens_total += tl.sum(model.to(tl.int32), 0).to(tl.int64)
                bad_total += tl.sum(bad.to(tl.int32), 0).to(tl.int64)
                trained_total += tl.sum(trained.to(tl.int32), 0).to(tl.int64)
        elif PER_SEQUENCE:
            for start in range(first, end, BLOCK):
                index = start + tl.arange(0, BLOCK)
                _, trained = masks(response_mask, loss_mask, index, index < end, HAS_LOSS_MASK)
                trained_total += tl.sum(trained.to(tl.int32), 0).to(tl.int64)
        scale = _inverse(inverse, INVERSE_POINTER)
        if PER_SEQUENCE:
            scale = scale / tl.maximum(trained_total, 1).to(tl.float32)

        units_before = tl.zeros((), tl.int64)
        tokens_before = tl.zeros((), tl.int64)
        bad_before = tl.zeros((), tl.int64)
        if HAS_STATE:
            units_before += tl.load(state + segment * 3)
            tokens_before += tl.load(state + segment * 3 + 1)
            bad_before += tl.load(state + segment * 3 + 2)
        units_sum = tl.zeros((), tl.int64)
        tokens_sum = tl.zeros((), tl.int64)
        bad_sum = tl.zeros((), tl.int64)
        trained_sum = tl.zeros((), tl.int64)
        high_sum = tl.zeros((), tl.int64)
        low_sum = tl.zeros((), tl.int64)
        dual_sum = tl.zeros((), tl.int64)
        capped_sum = tl.zeros((), tl.int64)
        loss_sum = tl.zeros((), tl.float64)
        excess_sum = tl.zeros((), tl.float64)
        squares_sum = tl.zeros((), tl.float64)
        largest_max = tl.full((), float("-inf"), tl.float32)
        smallest_max = tl.full((), float("-inf"), tl.float32)
        farthest_max = tl.full((), float("-inf"), tl.float32)
        for start in range(first, last, BLOCK):
            index = start + tl.arange(0, BLOCK)
            units, tokens, bad, counts, loss, excess, squares, largest, smallest, farthest = tile_loss(
                log_probs,
                old,
                response_mask,
                loss_mask,
                advantages,
                weights,
                table,
                gradient,
                token_loss_out,
                log_ratio_out,
                prefix_out,
                clip_out,
                index,
                index - window_start,
                index < end,
                index < last,
                segment,
                units_before + units_sum,
                tokens_before + tokens_sum,
                bad_before + bad_sum,
                units_total,
                tokens_total,
                bad_total,
                scale,
                low_bound,
                high_bound,
                dual_bound,
                HAS_OLD,
                HAS_LOSS_MASK,
                RATIO,
                POWER,
                ADVANTAGE_PER_TOKEN,
                HAS_WEIGHTS,
                WEIGHT_PER_TOKEN,
                PER_TOKEN,
            )
            units_sum += units
            tokens_sum += tokens
            bad_sum += bad
            trained_sum += counts & 0xFFF
            high_sum += (counts >> 12) & 0xFFF
            low_sum += (counts >> 24) & 0xFFF
            dual_sum += (counts >> 36) & 0xFFF
            capped_sum += (counts >> 48) & 0xFFF
            loss_sum += loss.to(tl.float64)
            excess_sum += excess.to(tl.float64)
            squares_sum += squares.to(tl.float64)
            largest_max = tl.maximum(largest_max, largest)
            smallest_max = tl.maximum(smallest_max, smallest)
            farthest_max = tl.maximum(farthest_max, farthest)
        if STREAM:
            tl.store(state + segment * 3, units_before + units_sum)
            tl.store(state + segment * 3 + 1, tokens_before + tokens_sum)
            tl.store(state + segment * 3 + 2, bad_before + bad_sum)
        store_partials(
            partials,
            segments,
            segment,
            loss_sum * scale,
            tokens_sum,
            units_sum,
            bad_sum,
            trained_sum,
            high_sum,
            low_sum,
            dual_sum,
            capped_sum,
            excess_sum,
            squares_sum,
            largest_max,
            smallest_max,
            farthest_max,
            STREAM,
        )


@triton.jit
def reduce_kernel(partials, out, loss, columns, BLOCK: tl.constexpr):
    """Grid: sums and maxima. out float64 from partials `[grid, columns]`; a NaN survives in the maxima.

    The first sum is the loss: `loss` gets it in its own dtype.
    """
    row = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float64)
    top = tl.full((BLOCK,), float("-inf"), tl.float64)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        total += tl.load(partials + row.to(tl.int64) * columns + column, mask=inside, other=0.0)
        value = tl.load(partials + row.to(tl.int64) * columns + column, mask=inside, other=float("-inf"))
        top = tl.maximum(top, tl.where(value != value, float("inf"), value))
    largest = tl.max(top, 0)
    largest = tl.where(largest == float("inf"), float("nan"), largest)
    result = tl.where(row < N_SUMS, tl.sum(total, 0), largest)
    tl.store(out + row, result)
    if row == 0:
        tl.store(loss, result.to(loss.dtype.element_ty))
