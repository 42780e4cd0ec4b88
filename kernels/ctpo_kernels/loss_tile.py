"""What the Triton kernels of the loss compute for one tile of one segment. Same integers and decisions as `loss_torch`.

A tile begins at a multiple of 16 tokens, so that each thread owns RUN adjacent tokens: scans and sums first run over
them in registers. Statistics are kept per run of RUN tokens and added up once, at the end of a program.
"""

import triton
import triton.language as tl

N_SUMS = tl.constexpr(10)  # len(SUMS)
UNIT = tl.constexpr(2.0**-40)
UNITS_PER_NAT = tl.constexpr(2.0**40)
LOG2E = tl.constexpr(1.4426950216293335)  # float32(log2 e)
LOG2E_REST = tl.constexpr(1.9259629911e-8)  # log2 e - float32(log2 e)
LN2 = tl.constexpr(0.6931471805599453)
INTEGER_FROM = tl.constexpr(8388608.0)  # 2^23: float32 values from here on are integers
INTEGER_FROM_BITS = tl.constexpr(0x4B000000)
SIGN_BIT = tl.constexpr(-(2**31))
# Clips of a run are counted in three fields of one int32: tokens above, below, beyond the dual bound.
CLIP_BITS, CLIP_MASK = tl.constexpr(10), tl.constexpr(1023)
CLIP_HIGH, CLIP_LOW, CLIP_DUAL = tl.constexpr(1), tl.constexpr(1 << 10), tl.constexpr(1 << 20)
CUMPROD, GEOMEAN, TOKEN, SEQUENCE, SEQUENCE_GEOMEAN = (tl.constexpr(i) for i in range(5))
POWER_ZERO, POWER_HALF, POWER_MINUS_HALF, POWER_TABLE = (tl.constexpr(i) for i in range(4))


@triton.jit
def load(
    log_probs, old, response_mask, loss_mask, offset, live, full, HAS_OLD: tl.constexpr, HAS_LOSS_MASK: tl.constexpr
):
    """log_probs, log_probs - old, response and loss flags; `live`: tokens of the segment.

    All tokens of a `full` tile are live: without a mask a thread loads 16 bytes at once.
    """
    if full:
        model = tl.load(response_mask + offset)
        trained = tl.load(loss_mask + offset) if HAS_LOSS_MASK else model
        new = tl.load(log_probs + offset)
        before = tl.load(old + offset) if HAS_OLD else new
    else:
        model = tl.load(response_mask + offset, mask=live, other=0)
        trained = tl.load(loss_mask + offset, mask=live, other=0) if HAS_LOSS_MASK else model
        new = tl.load(log_probs + offset, mask=live, other=0.0)
        before = tl.load(old + offset, mask=live, other=0.0) if HAS_OLD else new
    model = (model != 0) & live
    return new, new - before, model, model & (trained != 0) if HAS_LOSS_MASK else model


@triton.jit
def to_units(d, model):
    """d_t cut to 20 nats, 0 where masked, NaN kept; its int64 units, half to even, NaN as 0; int32 counts.

    A count is 1 for a response token and 2^16 more for NaN: a tile holds at most 2^15 tokens, so both sums fit.
    """
    d = tl.minimum(d, 20.0, propagate_nan=tl.PropagateNan.ALL)
    d = tl.maximum(d, -20.0, propagate_nan=tl.PropagateNan.ALL)
    scaled = tl.where(model & (d == d), d, 0.0) * UNITS_PER_NAT
    # Round to whole units: adding and subtracting 2^23 with the sign of the value removes the fraction.
    sign = scaled.to(tl.int32, bitcast=True) & SIGN_BIT
    integer_from = (sign | INTEGER_FROM_BITS).to(tl.float32, bitcast=True)
    whole = (scaled + integer_from) - integer_from
    units = tl.where(tl.abs(scaled) < INTEGER_FROM, whole, scaled).to(tl.int64)
    return tl.where(model, d, 0.0), units, tl.where(model, tl.where(d == d, 1, 0x10001), 0)


@triton.jit
def _nats(units, bad):
    """Units -> float32 nats and the rest that float32 cannot hold; NaN where `bad`."""
    rounded = units.to(tl.float32)
    # The low words suffice: the remainder is below 2^31 units wherever r_t is neither capped nor 0.
    rest = (units.to(tl.int32) - rounded.to(tl.int64).to(tl.int32)).to(tl.float32) * UNIT
    return tl.where(bad, float("nan"), rounded * UNIT), rest


@triton.jit
def _exp(x, rest):
    """exp(x + rest) without the error that the product x log2(e) has in float32."""
    y = x * LOG2E
    low = tl.fma(x, LOG2E_REST, -tl.fma(x, -LOG2E, y))
    power = tl.exp2(y)
    return tl.fma(power, tl.fma(low, LN2, rest), power)


@triton.jit
def _position_scale(position, table, live, POWER: tl.constexpr):
    if POWER == POWER_ZERO:
        return tl.full(position.shape, 1.0, tl.float32)
    elif POWER == POWER_TABLE:
        return tl.load(table + tl.maximum(position, 1) - 1, mask=live, other=1.0)
    else:
        # Rounded to nearest, as `tl.sqrt_rn` from 1 to 2^31, without its branch for other numbers.
        t = tl.maximum(position, 1).to(tl.float32)
        inverse = tl.rsqrt(t)
        root = t * inverse
        root = tl.fma(tl.fma(-root, root, t), inverse * 0.5, root)
        return root if POWER == POWER_HALF else tl.div_rn(tl.full(root.shape, 1.0, tl.float32), root)


@triton.jit
def _log_ratio(d, model, units_scan, bad_scan, position, units_total, tokens_total, bad_total, RATIO: tl.constexpr):
    """log r_t before the cap, 0 where masked, and the rest that float32 cannot hold."""
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
        log_ratio, rest = _nats(units_total, bad_total > 0)
        if RATIO == SEQUENCE_GEOMEAN:
            rest = tl.zeros(d.shape, tl.float32)
            log_ratio = tl.div_rn(log_ratio, tl.maximum(tokens_total, 1).to(tl.float32))
    return tl.where(model, log_ratio, 0.0), rest


@triton.jit
def _last(values, BLOCK: tl.constexpr):
    """The last of int64 values, in two sums of 32 bits: a warp adds those in one instruction."""
    here = tl.arange(0, BLOCK) == BLOCK - 1
    low = tl.sum(tl.where(here, values.to(tl.int32), 0), 0)
    high = tl.sum(tl.where(here, (values >> 32).to(tl.int32), 0), 0)
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


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
    start,
    live,
    stored,
    full,
    advantage,
    weight,
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
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
    HAS_OLD: tl.constexpr,
    HAS_LOSS_MASK: tl.constexpr,
    RATIO: tl.constexpr,
    DETACHED: tl.constexpr,
    POWER: tl.constexpr,
    ADVANTAGE_PER_TOKEN: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    WEIGHT_PER_TOKEN: tl.constexpr,
    PER_TOKEN: tl.constexpr,
):
    """Loss and gradient of the tile at `start`: writes the requested outputs.

    Returns the prefix after the tile, its response tokens and NaN (as `to_units` counts them), statistics per run.
    """
    offset = tl.arange(0, BLOCK)
    new, d, model, trained = load(
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
    units_scan = tl.cumsum(units, 0) + units_before
    counts_scan = tl.cumsum(counts, 0)
    position = (counts_scan & 0xFFFF) + tokens_before
    bad_scan = (counts_scan >= 0x10000) | (bad_before > 0)
    log_ratio, rest = _log_ratio(d, model, units_scan, bad_scan, position, units_total, tokens_total, bad_total, RATIO)

    if ADVANTAGE_PER_TOKEN:
        advantage = tl.load(advantages + start + offset, mask=live, other=0.0)
    else:
        advantage = tl.broadcast_to(advantage, [BLOCK])
    over = log_ratio > 10.0
    # 0 lies within the bounds, so tokens outside of the loss are never clipped.
    x = tl.where(trained, tl.where(over, 10.0, log_ratio), 0.0)
    free = trained & ~over
    widening = _position_scale(position, table, live, POWER)
    high = high_bound * widening
    low = -low_bound * widening
    dual = dual_bound * widening
    # By its sign an advantage has one bound. A weight has both, and meets the one on its ratio's side of 1.
    side = tl.where(x > 0, tl.abs(advantage), -tl.abs(advantage)) if DETACHED else advantage
    is_high = (side > 0) & (x > high)
    is_low = (side < 0) & (x < low)
    is_dual = (side < 0) & (x > dual)
    inside = ~(is_high | is_low | is_dual)
    ratio = _exp(x, tl.where(free, rest, 0.0))
    bound = tl.where(side > 0, high, tl.where(x < low, low, dual))
    at_bound = _exp(tl.where(inside, 0.0, bound), 0.0)
    token_loss = -advantage * tl.where(inside, ratio, at_bound)
    slope = -advantage * ratio
    learns = free & inside
    if DETACHED:
        slope = token_loss
        token_loss = slope * new
        learns = trained
    if HAS_WEIGHTS:
        if WEIGHT_PER_TOKEN:
            weight = tl.load(weights + start + offset, mask=live, other=0.0)
        token_loss = token_loss * weight
        slope = slope * weight
    token_loss = tl.where(trained, token_loss, 0.0)
    slope = tl.where(learns, slope, 0.0) * scale
    if full:
        tl.store(gradient + start + offset, slope)
    else:
        tl.store(gradient + start + offset, slope, mask=stored)
    if PER_TOKEN:
        tl.store(token_loss_out + start + offset, token_loss, mask=stored)
        tl.store(log_ratio_out + start + offset, log_ratio, mask=stored)
        tl.store(prefix_out + start + offset, tl.where(model, units_scan, 0), mask=stored)
        code = tl.where(is_high, 1, tl.where(is_low, 2, tl.where(is_dual, 3, tl.where(trained & over, 4, 0))))
        tl.store(clip_out + start + offset, code.to(tl.int8), mask=stored)

    excess = ratio - 1.0
    clipped = tl.where(inside, 0, tl.where(side > 0, CLIP_HIGH, tl.where(x < low, CLIP_LOW, CLIP_DUAL)))
    trained_capped = tl.where(trained, tl.where(over, 0x10001, 1), 0)
    # Maxima ignore NaN: a NaN ratio shows in the sum of the excess, and a NaN log-ratio is replaced by infinity.
    sound = log_ratio == log_ratio
    RUNS: tl.constexpr = [BLOCK // RUN, RUN]
    counted = trained & sound
    return (
        _last(units_scan, BLOCK),
        tl.sum(counts, 0),
        tl.sum(tl.reshape(clipped, RUNS), 1),
        tl.sum(tl.reshape(trained_capped, RUNS), 1),
        tl.sum(tl.reshape(token_loss, RUNS), 1),
        tl.sum(tl.reshape(excess, RUNS), 1),
        tl.sum(tl.reshape(excess * excess, RUNS), 1),
        tl.max(tl.reshape(tl.where(counted, ratio, float("-inf")), RUNS), 1),
        tl.min(tl.reshape(tl.where(counted, ratio, float("inf")), RUNS), 1),
        tl.max(tl.reshape(tl.where(sound, tl.abs(log_ratio), float("inf")), RUNS), 1),
    )


@triton.jit
def largest_of(values):
    """Return the largest of float32 values, non-negative or -inf, and not NaN: their bits have the same order."""
    return tl.max(values.to(tl.int32, bitcast=True), 0).to(tl.float32, bitcast=True)


@triton.jit
def smallest_of(values):
    """Return the smallest of such values."""
    return tl.min(values.to(tl.int32, bitcast=True), 0).to(tl.float32, bitcast=True)


@triton.jit
def store_partials(
    partials,
    columns,
    column,
    loss,
    loss_tokens,
    tokens,
    minus_d,
    excess,
    squares,
    high,
    low,
    dual,
    capped,
    largest,
    smallest,
    farthest,
    ADD: tl.constexpr,
):
    """Store one program's statistics, float64, in the order of SUMS and MAXIMA; ADD: add to the stored ones."""
    sums = (loss, loss_tokens, tokens, minus_d, excess, squares, high, low, dual, capped)
    maxima = (largest, smallest, farthest)
    for row in tl.static_range(len(sums)):
        value = sums[row].to(tl.float64)
        where = partials + (row * columns + column)
        if ADD:
            value += tl.load(where)
        tl.store(where, value)
    for row in tl.static_range(len(maxima)):
        where = partials + ((len(sums) + row) * columns + column)
        value = maxima[row].to(tl.float64)
        if ADD:
            value = tl.maximum(value, tl.load(where))
        tl.store(where, value)
