"""One token per row of logits: the argmax of greedy rows, the exponential race of the others.

The race is exactly `specdec.sampling.noise.race`, but nearly no logarithm is taken. With ``s = logit / temperature``
and the uniform u of a token, ``E = -log(1 - u) >= u``, so its score ``s - log E`` is at most ``s - log u``. The bits of
the float32 nearest to r + 0.5, read as an integer, give ``log2`` from below with an error under 0.087, so one
conversion and one addition bound the score from above. A token whose bound is not above the best score so far cannot
win; for the few others the score is computed in float64 as the reference does. Where not even the largest possible
noise (33 bits) could lift a block of 1024 tokens above the best, its noise is not generated at all: that makes rows
with a mask nearly free.

Both work on a range of the vocabulary: the best of a row is the best of its ranges, whatever the cut.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from specdec.cpu.compile import region
from specdec.cpu.simd import inlined, kernel, word
from specdec.sampling.codes import NAN_LOGITS, NO_TOKEN_LEFT
from specdec.sampling.cpu.bits import (
    INFINITY_BITS,
    LOWEST_KEY,
    as_float,
    float_bits,
    magnitude_bits,
    order_key,
)
from specdec.sampling.cpu.job import BLOCK, Job
from specdec.sampling.cpu.memory import float32s, float64s, int64s, next_item, range_of, row_address, uint16s

_MULTIPLIER_0 = np.uint64(0xD2511F53)
_MULTIPLIER_1 = np.uint64(0xCD9E8D57)
_WEYL_0 = np.uint32(0x9E3779B9)
_WEYL_1 = np.uint32(0xBB67AE85)
_SHIFT = np.uint64(32)

_LOG2_E = 1.0 / math.log(2.0)
_INFINITY = np.float32(np.inf)
_NOISE_LIMIT = np.float32(33.1)
"""-log2 of the smallest uniform, 2**-33, and some room."""
_EXPONENT_BIAS = np.float32(127.0 + 32.0)
_MANTISSA = np.float32(2.0**-23)
_SLACK = 1e-6
"""Relative error of a bound in float32; bounds near the best score are below |best| + 256 in size."""


@inlined
def philox(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """Philox4x32-10 on uint32 words."""
    for _ in range(10):
        p0 = _MULTIPLIER_0 * np.uint64(c0)
        p1 = _MULTIPLIER_1 * np.uint64(c2)
        c0 = np.uint32(p1 >> _SHIFT) ^ c1 ^ k0
        c1 = np.uint32(p1)
        c2 = np.uint32(p0 >> _SHIFT) ^ c3 ^ k1
        c3 = np.uint32(p0)
        k0 = np.uint32(k0 + _WEYL_0)
        k1 = np.uint32(k1 + _WEYL_1)
    return c0, c1, c2, c3


@kernel
def fill_words(words: Any, first_token: Any, p0: Any, p1: Any, purpose: Any, k0: Any, k1: Any) -> None:
    """Write the random words of `BLOCK` tokens starting at ``first_token``, a multiple of four."""
    first = np.uint32(first_token >> 2)
    for i in range(BLOCK // 4):
        w0, w1, w2, w3 = philox(np.uint32(first + np.uint32(i)), p0, p1, purpose, k0, k1)
        words[4 * i] = w0
        words[4 * i + 1] = w1
        words[4 * i + 2] = w2
        words[4 * i + 3] = w3


@inlined
def _score(logit: Any, temperature: Any, word: Any) -> Any:
    uniform = (np.float64(word) + 0.5) * 2.0**-32
    return np.float64(logit) / np.float64(temperature) - math.log(-math.log1p(-uniform))


@inlined
def _threshold(best: Any) -> Any:
    """Bounds (in bits) at or below this cannot belong to a score above ``best``."""
    bits = best * _LOG2_E
    return np.float32(bits - (abs(bits) + 256.0) * _SLACK)


@kernel
def argmax(row: Any) -> Any:
    """The largest logit of a range, float64, and its first index there, or a code of `specdec.sampling.outcome`."""
    best = LOWEST_KEY
    token = NO_TOKEN_LEFT
    largest = np.int32(0)
    for start in range(0, row.shape[0], BLOCK):
        block = row[start : start + BLOCK]
        top = LOWEST_KEY
        for i in range(block.shape[0]):
            value = as_float(block[i])
            top = np.int32(max(top, order_key(value)))
            largest = np.int32(max(largest, magnitude_bits(value)))
        if top > best:
            best = top
            for i in range(block.shape[0]):
                if order_key(as_float(block[i])) == top:
                    token = start + i
                    break
    if largest > INFINITY_BITS:
        return np.nan, NAN_LOGITS
    if best == -INFINITY_BITS or token < 0:
        return -np.inf, NO_TOKEN_LEFT
    return np.float64(as_float(row[token])), token


@inlined
def _scale(block: Any, factor: Any, threshold: Any, bounds: Any) -> Any:
    """Write the scores without noise, in bits; count those that noise could lift over the threshold, and faults."""
    alive = np.int32(0)
    faults = np.int32(0)
    for i in range(block.shape[0]):
        scaled = as_float(block[i]) * factor
        bounds[i] = scaled
        alive = np.int32(alive + np.int32(scaled + _NOISE_LIMIT > threshold))
        faults = np.int32(faults + np.int32(not (scaled < _INFINITY)))
    return alive, faults


@inlined
def _add_noise_bound(bounds: Any, words: Any, size: Any, threshold: Any) -> Any:
    """Add the upper bound of the noise to each score; count those above the threshold."""
    alive = np.int32(0)
    for i in range(size):
        bits = float_bits(np.float32(words[i]) + np.float32(0.5))
        bound = bounds[i] + (_EXPONENT_BIAS - np.float32(bits) * _MANTISSA)
        bounds[i] = bound
        alive = np.int32(alive + np.int32(bound > threshold))
    return alive


@kernel
def race(
    row: Any, first_token: Any, temperature: Any, seed: Any, position: Any, purpose: Any, words: Any, bounds: Any
) -> Any:
    """The best score of a range that starts at token ``first_token``, and its index in the range, or a code."""
    k0, k1 = np.uint32(seed), np.uint32(np.uint64(seed) >> _SHIFT)
    p0, p1 = np.uint32(position), np.uint32(np.uint64(position) >> _SHIFT)
    factor = np.float32(_LOG2_E / np.float64(temperature))
    best = -np.inf
    token = NO_TOKEN_LEFT
    threshold = np.float32(-np.inf)
    for start in range(0, row.shape[0], BLOCK):
        block = row[start : start + BLOCK]
        size = block.shape[0]
        alive, faults = _scale(block, factor, threshold, bounds)
        if faults > 0:
            return np.nan, NAN_LOGITS
        if alive == 0:
            continue
        fill_words(words, first_token + start, p0, p1, purpose, k0, k1)
        alive = _add_noise_bound(bounds, words, size, threshold)
        if alive == 0:
            continue
        if alive > 4:
            # The most promising token first, so that few others pass the raised threshold.
            first = 0
            for i in range(1, size):
                if bounds[i] > bounds[first]:
                    first = i
            score = _score(as_float(block[first]), temperature, words[first])
            if score > best:
                best, token, threshold = score, start + first, _threshold(score)
        for i in range(size):
            if bounds[i] > threshold:
                score = _score(as_float(block[i]), temperature, words[i])
                if score > best or (score == best and start + i < token):
                    best, token, threshold = score, start + i, _threshold(score)
    return best, token


@kernel
def choose(
    row: Any, first: Any, temperature: Any, seed: Any, position: Any, purpose: Any, words: Any, bounds: Any
) -> Any:
    """The score and the token of a range that starts at token ``first``: its argmax at temperature 0, else its race."""
    if temperature == 0:
        score, token = argmax(row)
    else:
        score, token = race(row, first, temperature, seed, position, purpose, words, bounds)
    return score, (token if token < 0 else first + token)


@region
def choose_region(block: int) -> None:
    """The argmax or the race of each item, with its argument block `Job`: SCORES and TOKENS."""
    count, parts = word(block, Job.COUNT), word(block, Job.PARTS)
    temperature = float32s(word(block, Job.TEMPERATURE), count)
    seeds, positions = int64s(word(block, Job.SEEDS), count), int64s(word(block, Job.POSITIONS), count)
    scores = float64s(word(block, Job.SCORES), count * parts)
    tokens = int64s(word(block, Job.TOKENS), count * parts)
    purpose = np.uint32(word(block, Job.PURPOSE))
    words = np.empty(BLOCK, dtype=np.uint32)
    bounds = np.empty(BLOCK, dtype=np.float32)
    item = next_item(block)
    while item >= 0:
        e, first, end = range_of(block, item)
        address = row_address(block, e, first)
        if word(block, Job.BFLOAT16) != 0:
            halves = uint16s(address, end - first)
            score, token = choose(halves, first, temperature[e], seeds[e], positions[e], purpose, words, bounds)
        else:
            floats = float32s(address, end - first)
            score, token = choose(floats, first, temperature[e], seeds[e], positions[e], purpose, words, bounds)
        scores[item], tokens[item] = score, token
        item = next_item(block)
