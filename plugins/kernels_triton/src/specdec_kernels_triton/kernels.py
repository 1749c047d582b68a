"""The Triton kernels.

Rows of logits are cut into tiles of the vocabulary, one program each; a second kernel, one program per row, joins the
tiles. Scores are computed twice: in float32 for all tokens, then in float64, as the reference does, for the tiles whose
best comes within `MARGIN` of the row's best, nearly always one. So the winner is the reference's, at the price of
float32, and no order of programs changes it.

Truth values of a row are spread over a tile by arithmetic (``index * 0 + t > 0``): Triton's interpreter does not
broadcast scalar ones.

Noise is `specdec.sampling.noise`: Philox4x32-10 with counter (token id // 4, position low, position high, purpose) and
the seed as key; token id 4 c + j takes word j.
"""

# Triton reads annotations other than tl.constexpr, so there are none.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import triton
import triton.language as tl

MARGIN = tl.constexpr(1e-3)
"""Absolute, on scores; relative, on weights. float32 scores are wrong by less: by 2e-5, the hardware's logarithm
included, and by 1e-6 of the size of the scaled logit, which is added."""
NAN_LOGITS = tl.constexpr(-2)
NO_TOKEN_LEFT = tl.constexpr(-3)
_FAR = tl.constexpr(1 << 30)


@triton.jit
def token_words(seed, position, purpose: tl.constexpr, first, TILE: tl.constexpr):
    """uint32 [TILE]: the random words of the tokens from ``first`` on, a multiple of four."""
    groups = (first // 4 + tl.arange(0, TILE // 4)).to(tl.uint32)
    zeros = groups ^ groups
    p0 = zeros + (position & 0xFFFFFFFF).to(tl.uint32)
    p1 = zeros + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    k0 = zeros + (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = zeros + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox_impl(groups, p0, p1, zeros + purpose, k0, k1)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def _exponential32(words):
    """Exp(1) noise in float32: right to 2e-5 relative even where the hardware's logarithm is not, near 1."""
    u = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = u * (1.0 + u * (0.5 + u * (0.33333334 + u * (0.25 + u * 0.2))))
    rest = ((0xFFFFFFFF - words).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return tl.where(u < 0.015625, series, -tl.log(rest))


@triton.jit
def _exponential64(words):
    """-log1p(-u) in float64, by Kahan's formula."""
    u = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    v = 1.0 - u
    same = v == 1.0
    return tl.where(same, u, -tl.log(tl.where(same, 0.5, v)) * u / tl.where(same, 1.0, 1.0 - v))


@triton.jit
def _row_of(rows, e, HAS_ROWS: tl.constexpr):
    if HAS_ROWS:  # noqa: SIM108
        row = tl.load(rows + e).to(tl.int64)
    else:
        row = e.to(tl.int64)
    return row


@triton.jit
def race_tiles(
    logits,
    row_stride,
    vocab,
    rows,
    temperature,
    seeds,
    positions,
    normalizers,
    rejected,
    probs,
    prob_stride,
    prob_rows,
    scores,
    weights,
    faults,
    purpose: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
    HAS_PROBS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The best float32 score of each tile, and whether it holds a fault; grid (E, tiles).

    With HAS_DRAFT also the largest w / E of each tile, w being what is left of the target's law.
    """
    e = tl.program_id(0)
    tile = tl.program_id(1)
    t = tl.load(temperature + e)
    first = tile * TILE
    index = first + tl.arange(0, TILE)
    inside = index < vocab
    x = tl.load(logits + _row_of(rows, e, HAS_ROWS) * row_stride + index, mask=inside, other=-float("inf")).to(
        tl.float32
    )
    sampled = index * 0 + t > 0
    fault = (x != x) | (sampled & (x == float("inf")))
    x = tl.where(fault, -float("inf"), x)
    noise = _exponential32(token_words(tl.load(seeds + e), tl.load(positions + e), purpose, first, TILE))
    score = tl.where(sampled, x / tl.where(t > 0, t, 1.0) - tl.log(noise), x)
    out = e * tl.num_programs(1) + tile
    tl.store(scores + out, tl.max(score, axis=0))
    tl.store(faults + out, tl.max(fault.to(tl.int32), axis=0))
    if HAS_DRAFT:
        left = _weight_left(x, index, inside, e, t, normalizers, rejected, probs, prob_stride, prob_rows, HAS_PROBS)
        tl.store(weights + out, tl.max(left.to(tl.float32) / noise, axis=0))


@triton.jit
def _weight_left(
    x,
    index,
    inside,
    e,
    t,
    normalizers,
    rejected,
    probs,
    prob_stride,
    prob_rows,
    HAS_PROBS: tl.constexpr,
):
    """float64: (P - Q)+ of tokens, or P without the rejected token for a one-hot draft."""
    scaled = x.to(tl.float64) / tl.where(t > 0, t, 1.0).to(tl.float64) - tl.load(normalizers + e)
    left = tl.exp(scaled)
    one_hot = inside
    if HAS_PROBS:
        prob_row = tl.load(prob_rows + e).to(tl.int64)
        one_hot = index * 0 + prob_row < 0
        taken = tl.load(probs + prob_row * prob_stride + index, mask=inside & (one_hot == 0), other=0.0)
        left = left - taken.to(tl.float64)
    removed = (index == tl.load(rejected + e)) & one_hot
    return tl.where((left > 0) & inside & (removed == 0), left, 0.0)


@triton.jit
def race_pick(
    logits,
    row_stride,
    vocab,
    rows,
    temperature,
    seeds,
    positions,
    normalizers,
    rejected,
    probs,
    prob_stride,
    prob_rows,
    scores,
    weights,
    faults,
    tokens,
    num_tiles,
    purpose: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
    HAS_PROBS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """The winner of each entry from the tiles that can hold it, in float64; grid (E)."""
    e = tl.program_id(0)
    t = tl.load(temperature + e)
    seed, position = tl.load(seeds + e), tl.load(positions + e)
    row = logits + _row_of(rows, e, HAS_ROWS) * row_stride
    tiles = tl.arange(0, TILES)
    real = tiles < num_tiles
    of_tile = tl.load(scores + e * num_tiles + tiles, mask=real, other=-float("inf"))
    faulty = tl.max(tl.load(faults + e * num_tiles + tiles, mask=real, other=0), axis=0)
    best = tl.max(of_tile, axis=0)
    nothing = best == -float("inf")
    limit = tl.where(t > 0, best - MARGIN - 1e-6 * (tl.abs(best) + 32.0), best)
    residual = best != best
    if HAS_DRAFT:
        weight_of_tile = tl.load(weights + e * num_tiles + tiles, mask=real, other=0.0)
        most = tl.max(weight_of_tile, axis=0)
        residual = (t > 0) & (tl.load(rejected + e) >= 0) & (most > 0)
        of_tile = tl.where(tiles * 0 + residual.to(tl.int32) > 0, weight_of_tile, of_tile)
        limit = tl.where(residual, most * (1.0 - MARGIN), limit)
    promising = real & (of_tile >= limit) & (of_tile > -float("inf"))
    tile = tl.min(tl.where(promising, tiles, _FAR), axis=0)
    top = tl.full([], -float("inf"), tl.float64)
    winner = tl.full([], -3, tl.int64)
    while tile < num_tiles:
        first = tile * TILE
        index = first + tl.arange(0, TILE)
        inside = index < vocab
        x = tl.load(row + index, mask=inside, other=-float("inf")).to(tl.float32)
        noise = _exponential64(token_words(seed, position, purpose, first, TILE))
        wide = x.to(tl.float64)
        scaled = wide / tl.where(t > 0, t, 1.0).to(tl.float64)
        score = tl.where(index * 0 + t > 0, scaled - tl.log(noise), wide)
        if HAS_DRAFT:
            left = _weight_left(x, index, inside, e, t, normalizers, rejected, probs, prob_stride, prob_rows, HAS_PROBS)
            score = tl.where(index * 0 + residual.to(tl.int32) > 0, left / noise, score)
        score = tl.where(inside & (score == score), score, -float("inf"))
        here = tl.max(score, axis=0)
        place = tl.min(tl.where(score == here, index, _FAR), axis=0)
        winner = tl.where(here > top, place.to(tl.int64), winner)
        top = tl.maximum(here, top)
        tile = tl.min(tl.where(promising & (tiles > tile), tiles, _FAR), axis=0)
    winner = tl.where(nothing, NO_TOKEN_LEFT, winner)
    tl.store(tokens + e, tl.where(faulty > 0, NAN_LOGITS, winner))


@triton.jit
def normalize_tiles(
    logits,
    row_stride,
    vocab,
    rows,
    temperature,
    largest,
    sums,
    faults,
    HAS_ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """The largest logit of each tile and the sum of exp((logit - it) / temperature); grid (E, tiles)."""
    e = tl.program_id(0)
    tile = tl.program_id(1)
    t = tl.load(temperature + e)
    index = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + _row_of(rows, e, HAS_ROWS) * row_stride + index, mask=index < vocab, other=-float("inf")).to(
        tl.float32
    )
    sampled = index * 0 + t > 0
    fault = (x != x) | (sampled & (x == float("inf")))
    x = tl.where(fault, -float("inf"), x)
    top = tl.max(x, axis=0)
    distance = tl.where(sampled, x - tl.where(tl.abs(top) == float("inf"), 0.0, top), -float("inf"))
    mass = tl.exp(distance / tl.where(t > 0, t, 1.0))
    out = e * tl.num_programs(1) + tile
    tl.store(largest + out, top)
    tl.store(sums + out, tl.sum(mass, axis=0))
    tl.store(faults + out, tl.max(fault.to(tl.int32), axis=0))


@triton.jit
def normalize_join(
    logits,
    row_stride,
    vocab,
    rows,
    temperature,
    largest,
    sums,
    faults,
    log_normalizers,
    tokens,
    num_tiles,
    HAS_ROWS: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Join the tiles: log-sum-exp (at temperature 0 the largest logit) and first largest token; grid (E)."""
    e = tl.program_id(0)
    t = tl.load(temperature + e)
    tiles = tl.arange(0, TILES)
    real = tiles < num_tiles
    of_tile = tl.load(largest + e * num_tiles + tiles, mask=real, other=-float("inf"))
    mass = tl.load(sums + e * num_tiles + tiles, mask=real, other=0.0)
    faulty = tl.max(tl.load(faults + e * num_tiles + tiles, mask=real, other=0), axis=0)
    top = tl.max(of_tile, axis=0)
    nothing = top == -float("inf")
    scale = tl.where(t > 0, t, 1.0).to(tl.float64)
    base = tl.where(nothing | (top == float("inf")), 0.0, top)
    factor = tl.exp((tl.where(of_tile == float("inf"), 0.0, of_tile) - base).to(tl.float64) / scale)
    total = tl.sum(mass.to(tl.float64) * factor, axis=0)
    value = tl.where(t > 0, base.to(tl.float64) / scale + tl.log(tl.where(total > 0, total, 1.0)), top.to(tl.float64))
    tile = tl.min(tl.where(real & (of_tile == top), tiles, _FAR), axis=0)
    index = tile * TILE + tl.arange(0, TILE)
    x = tl.load(logits + _row_of(rows, e, HAS_ROWS) * row_stride + index, mask=index < vocab, other=-float("inf")).to(
        tl.float32
    )
    token = tl.min(tl.where((x == top) & (index < vocab), index, _FAR), axis=0).to(tl.int64)
    token = tl.where(nothing, NO_TOKEN_LEFT, token)
    tl.store(log_normalizers + e, tl.where(nothing | (faulty > 0), float("nan"), value))
    tl.store(tokens + e, tl.where(faulty > 0, NAN_LOGITS, token))


@triton.jit
def accept_drafts(
    logits,
    row_stride,
    vocab,
    count,
    rows,
    temperature,
    seeds,
    positions,
    normalizers,
    largest,
    token_ids,
    probs,
    prob_stride,
    prob_rows,
    accepted,
    purpose: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_PROBS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """u Q(X) <= P(X) for BLOCK entries at a time; grid (blocks of entries)."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = e < count
    token = tl.load(token_ids + e, mask=real, other=-1)
    is_token = (token >= 0) & (token < vocab)
    token = tl.where(is_token, token, 0)
    if HAS_ROWS:  # noqa: SIM108
        row = tl.load(rows + e, mask=real, other=0).to(tl.int64)
    else:
        row = e.to(tl.int64)
    t = tl.load(temperature + e, mask=real, other=0.0)
    x = tl.load(logits + row * row_stride + token, mask=real, other=0.0).to(tl.float64)
    normalizer = tl.load(normalizers + e, mask=real, other=0.0)
    target = tl.exp(x / tl.where(t > 0, t, 1.0).to(tl.float64) - normalizer)
    drafted = tl.full([BLOCK], 1.0, tl.float64)
    if HAS_PROBS:
        prob_row = tl.load(prob_rows + e, mask=real, other=-1).to(tl.int64)
        given = tl.load(probs + prob_row * prob_stride + token, mask=real & (prob_row >= 0), other=1.0)
        drafted = given.to(tl.float64)
    seed = tl.load(seeds + e, mask=real, other=0)
    position = tl.load(positions + e, mask=real, other=0)
    word, _w1, _w2, _w3 = tl.philox_impl(
        tl.zeros([BLOCK], dtype=tl.uint32),
        (position & 0xFFFFFFFF).to(tl.uint32),
        ((position >> 32) & 0xFFFFFFFF).to(tl.uint32),
        tl.zeros([BLOCK], dtype=tl.uint32) + purpose,
        (seed & 0xFFFFFFFF).to(tl.uint32),
        ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32),
    )
    uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    fits = (uniform * drafted <= target) & (drafted > 0)
    same = token == tl.load(largest + e, mask=real, other=-1)
    tl.store(accepted + e, is_token & tl.where(t > 0, fits, same), mask=real)


@triton.jit
def write_words(seeds, positions, out, num_tokens, purpose: tl.constexpr, TILE: tl.constexpr):
    """Write the random words of tokens 0 .. num_tokens - 1 as int64 [E, num_tokens]; grid (E, tiles)."""
    e = tl.program_id(0)
    first = tl.program_id(1) * TILE
    words = token_words(tl.load(seeds + e), tl.load(positions + e), purpose, first, TILE)
    index = first + tl.arange(0, TILE)
    tl.store(out + e.to(tl.int64) * num_tokens + index, words.to(tl.int64), mask=index < num_tokens)
