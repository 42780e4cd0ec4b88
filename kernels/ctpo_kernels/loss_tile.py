"""What the Triton kernels of the loss do with one tile of one segment. Same integers and decisions as `loss_torch`."""

import triton
import triton.language as tl

N_SUMS = tl.constexpr(10)  # len(SUMS)
UNIT = tl.constexpr(2.0**-40)
UNITS_PER_NAT = tl.constexpr(2.0**40)
LOG2E = tl.constexpr(1.4426950216293335)  # float32(log2 e)
LOG2E_REST = tl.constexpr(1.9259629911e-8)  # log2 e - float32(log2 e)
LN2 = tl.constexpr(0.6931471805599453)
INTEGER_FROM = tl.constexpr(8388608.0)  # 2^23: float32 values from here on are integers
CUMPROD, GEOMEAN, TOKEN, SEQUENCE, SEQUENCE_GEOMEAN = (tl.constexpr(i) for i in range(5))
POWER_ZERO, POWER_HALF, POWER_MINUS_HALF, POWER_TABLE = (tl.constexpr(i) for i in range(4))


@triton.jit
def masks(response_mask, loss_mask, index, live, HAS_LOSS_MASK: tl.constexpr):
    """Response and loss flags; `live`: tokens of the segment."""
    model = tl.load(response_mask + index, mask=live, other=0) != 0
    return model, model & (tl.load(loss_mask + index, mask=live, other=0) != 0) if HAS_LOSS_MASK else model


@triton.jit
def token(log_probs, old, response_mask, loss_mask, index, live, HAS_OLD: tl.constexpr, HAS_LOSS_MASK: tl.constexpr):
    """d_t (0 where masked, NaN kept), its int64 units (half to even, NaN as 0), NaN, response and loss flags."""
    model, trained = masks(response_mask, loss_mask, index, live, HAS_LOSS_MASK)
    new = tl.load(log_probs + index, mask=live, other=0.0)
    d = new - (tl.load(old + index, mask=live, other=0.0) if HAS_OLD else new)
    # Comparisons instead of min and max: those may drop a NaN.
    d = tl.where(d > 20.0, 20.0, d)
    d = tl.where(d < -20.0, -20.0, d)
    d = tl.where(model, d, 0.0)
    bad = d != d
    scaled = tl.where(bad, 0.0, d) * UNITS_PER_NAT
    size = tl.abs(scaled)
    size = tl.where(size < INTEGER_FROM, (size + INTEGER_FROM) - INTEGER_FROM, size)
    units = tl.where(scaled < 0, -size, size).to(tl.int64)
    return d, units, bad, model, trained


@triton.jit
def _nats(units, bad):
    """Units -> float32 nats and the rest that float32 cannot hold; NaN where `bad`."""
    rounded = units.to(tl.float32)
    rest = (units - rounded.to(tl.int64)).to(tl.float32) * UNIT
    return tl.where(bad > 0, float("nan"), rounded * UNIT), rest


@triton.jit
def _exp(x, rest):
    """exp(x + rest) without the error that the product x log2(e) has in float32."""
    y = x * LOG2E
    low = tl.fma(x, LOG2E, -y) + x * LOG2E_REST + rest * LOG2E
    return tl.exp2(y) * (1.0 + low * LN2)


@triton.jit
def _position_scale(position, table, live, POWER: tl.constexpr):
    t = tl.maximum(position, 1)
    if POWER == POWER_ZERO:
        return tl.full(t.shape, 1.0, tl.float32)
    elif POWER == POWER_HALF:
        return tl.sqrt_rn(t.to(tl.float32))
    elif POWER == POWER_MINUS_HALF:
        return tl.div_rn(tl.full(t.shape, 1.0, tl.float32), tl.sqrt_rn(t.to(tl.float32)))
    else:
        return tl.load(table + t - 1, mask=live, other=1.0)


@triton.jit
def tile_loss(
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
    out_index,
    live,
    stored,
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
    HAS_OLD: tl.constexpr,
    HAS_LOSS_MASK: tl.constexpr,
    RATIO: tl.constexpr,
    POWER: tl.constexpr,
    ADVANTAGE_PER_TOKEN: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    WEIGHT_PER_TOKEN: tl.constexpr,
    PER_TOKEN: tl.constexpr,
):
    """Loss and gradient of one tile: writes the gradient, returns the tile's integer totals and statistics."""
    d, units, bad, model, trained = token(log_probs, old, response_mask, loss_mask, index, live, HAS_OLD, HAS_LOSS_MASK)
    units_scan = tl.cumsum(units, 0) + units_before
    # Both counts fit into one int32 scan: a tile holds at most 2^15 tokens.
    both = tl.cumsum(model.to(tl.int32) + (bad.to(tl.int32) << 16), 0)
    position = (both & 0xFFFF).to(tl.int64) + tokens_before
    bad_scan = (both >> 16).to(tl.int64) + bad_before

    rest = tl.zeros(d.shape, tl.float32)
    if RATIO == TOKEN:
        log_ratio = d
    elif RATIO == CUMPROD:
        log_ratio, rest = _nats(units_scan, bad_scan)
    elif RATIO == GEOMEAN:
        log_ratio, rest = _nats(units_scan, bad_scan)
        rest = tl.zeros(d.shape, tl.float32)
        log_ratio = tl.div_rn(log_ratio, tl.maximum(position, 1).to(tl.float32))
    else:
        whole = units_total + tl.zeros(d.shape, tl.int64)
        log_ratio, rest = _nats(whole, bad_total + tl.zeros(d.shape, tl.int64))
        if RATIO == SEQUENCE_GEOMEAN:
            rest = tl.zeros(d.shape, tl.float32)
            length = (tl.maximum(tokens_total, 1) + tl.zeros(d.shape, tl.int64)).to(tl.float32)
            log_ratio = tl.div_rn(log_ratio, length)
    log_ratio = tl.where(model, log_ratio, 0.0)
    rest = tl.where(model, rest, 0.0)

    if ADVANTAGE_PER_TOKEN:
        advantage = tl.load(advantages + index, mask=live, other=0.0)
    else:
        advantage = tl.load(advantages + segment) + tl.zeros(d.shape, tl.float32)
    advantage = tl.where(trained, advantage, 0.0)
    over = log_ratio > 10.0
    x = tl.where(over, 10.0, log_ratio)
    rest = tl.where(over, 0.0, rest)
    widening = _position_scale(position, table, live, POWER)
    high = high_bound * widening
    low = -low_bound * widening
    dual = dual_bound * widening
    is_high = (advantage > 0) & (x > high)
    is_low = (advantage < 0) & (x < low)
    is_dual = (advantage < 0) & (x > dual)
    bounded = tl.where(is_high, high, tl.where(is_low, low, tl.where(is_dual, dual, x)))
    inside = ~(is_high | is_low | is_dual)
    ratio = _exp(x, rest)
    token_loss = -advantage * tl.where(
        inside, ratio, _exp(tl.where(inside, 0.0, bounded), tl.zeros(d.shape, tl.float32))
    )
    slope = -advantage * ratio
    if HAS_WEIGHTS:
        if WEIGHT_PER_TOKEN:
            weight = tl.load(weights + index, mask=live, other=0.0)
        else:
            weight = tl.load(weights + segment) + tl.zeros(d.shape, tl.float32)
        token_loss = token_loss * weight
        slope = slope * weight
    token_loss = tl.where(trained, token_loss, 0.0)
    tl.store(gradient + out_index, tl.where(trained & inside & ~over, slope * scale, 0.0), mask=stored)
    if PER_TOKEN:
        tl.store(token_loss_out + out_index, token_loss, mask=stored)
        tl.store(log_ratio_out + out_index, log_ratio, mask=stored)
        tl.store(prefix_out + out_index, tl.where(model, units_scan, 0), mask=stored)
        code = tl.where(is_high, 1, tl.where(is_low, 2, tl.where(is_dual, 3, tl.where(trained & over, 4, 0))))
        tl.store(clip_out + out_index, code.to(tl.int8), mask=stored)

    # Five counts of at most 2^11 in one 64-bit sum.
    flags = trained.to(tl.int64) + (is_high.to(tl.int64) << 12) + (is_low.to(tl.int64) << 24)
    flags += (is_dual.to(tl.int64) << 36) + ((trained & over).to(tl.int64) << 48)
    counts = tl.sum(flags, 0)
    excess = tl.where(trained, ratio - 1.0, 0.0)
    # max ignores a NaN: infinity stands in for it (no ratio is infinite) and is turned back at the end.
    infinity = float("inf")
    nan = ratio != ratio
    largest = tl.max(tl.where(trained, tl.where(nan, infinity, ratio), -infinity), 0)
    smallest = tl.max(tl.where(trained, tl.where(nan, infinity, -ratio), -infinity), 0)
    nan = log_ratio != log_ratio
    farthest = tl.max(tl.where(model, tl.where(nan, infinity, tl.abs(log_ratio)), -infinity), 0)
    last = tl.sum(model.to(tl.int32) + (bad.to(tl.int32) << 16), 0)
    return (
        tl.sum(units, 0),
        (last & 0xFFFF).to(tl.int64),
        (last >> 16).to(tl.int64),
        counts,
        tl.sum(token_loss, 0),
        tl.sum(excess, 0),
        tl.sum(excess * excess, 0),
        largest,
        smallest,
        farthest,
    )


@triton.jit
def store_partials(
    partials,
    stride,
    column,
    loss,
    tokens,
    units,
    bad,
    loss_tokens,
    high,
    low,
    dual,
    capped,
    excess,
    squares,
    largest,
    smallest,
    farthest,
    ADD: tl.constexpr,
):
    """One program's statistics, float64, in the order of SUMS and MAXIMA; ADD: on top of what stands there."""
    minus_d = tl.where(bad > 0, float("nan"), -(units.to(tl.float64)) * UNIT)
    base = partials + column
    if ADD:
        loss += tl.load(base)
        loss_tokens += tl.load(base + stride).to(tl.int64)
        tokens += tl.load(base + 2 * stride).to(tl.int64)
        minus_d += tl.load(base + 3 * stride)
        excess += tl.load(base + 4 * stride)
        squares += tl.load(base + 5 * stride)
        high += tl.load(base + 6 * stride).to(tl.int64)
        low += tl.load(base + 7 * stride).to(tl.int64)
        dual += tl.load(base + 8 * stride).to(tl.int64)
        capped += tl.load(base + 9 * stride).to(tl.int64)
        largest = tl.maximum(largest.to(tl.float64), tl.load(base + 10 * stride))
        smallest = tl.maximum(smallest.to(tl.float64), tl.load(base + 11 * stride))
        farthest = tl.maximum(farthest.to(tl.float64), tl.load(base + 12 * stride))
    tl.store(base, loss)
    tl.store(base + stride, loss_tokens.to(tl.float64))
    tl.store(base + 2 * stride, tokens.to(tl.float64))
    tl.store(base + 3 * stride, minus_d)
    tl.store(base + 4 * stride, excess.to(tl.float64))
    tl.store(base + 5 * stride, squares.to(tl.float64))
    tl.store(base + 6 * stride, high.to(tl.float64))
    tl.store(base + 7 * stride, low.to(tl.float64))
    tl.store(base + 8 * stride, dual.to(tl.float64))
    tl.store(base + 9 * stride, capped.to(tl.float64))
    tl.store(base + 10 * stride, largest.to(tl.float64))
    tl.store(base + 11 * stride, smallest.to(tl.float64))
    tl.store(base + 12 * stride, farthest.to(tl.float64))
