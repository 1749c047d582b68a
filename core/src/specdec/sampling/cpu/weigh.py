"""What rejection sampling asks of a row: its normalizer, and the race over what a rejected draft token leaves.

The race over weights w needs no logarithm of them: the token with the largest ``w / E`` wins, E exponential noise.
With the uniform u of a token, ``E = -log(1 - u) >= u``, so only tokens with ``w > best * u`` can beat the best so far.
Bounds of w in float32 decide which tokens are looked at in float64.
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
    float_from_bits,
    magnitude_bits,
    order_key,
)
from specdec.sampling.cpu.choose import fill_words
from specdec.sampling.cpu.exponential import LOWEST_EXPONENT, exp32
from specdec.sampling.cpu.job import BLOCK, Job
from specdec.sampling.cpu.memory import float32s, float64s, int64s, next_item, range_of, row_address, uint16s

NO_WEIGHT = -1
"""In place of a token where no weight is above 0."""

_UNIFORM = 2.0**-32
_ZERO, _ONE = np.float32(0), np.float32(1)
_NEVER = np.float32(-1)
_LOWEST = np.float32(-80.0)
"""exp(-80) is nothing beside the largest token's mass."""
_ABOVE = np.float32(1.0001)
"""Makes a float32 probability a bound: its logarithm, at most 80 below that of the largest, is right to 2e-5."""
_TINY = np.float32(1e-34)
"""Above what exp(-80) leaves out."""
_SHIFT = np.uint64(32)


@inlined
def _top(block: Any) -> Any:
    """The order key of a block's largest value, the first index that has it, and the largest magnitude's bits."""
    top = LOWEST_KEY
    magnitude = np.int32(0)
    for i in range(block.shape[0]):
        value = as_float(block[i])
        top = np.int32(max(top, order_key(value)))
        magnitude = np.int32(max(magnitude, magnitude_bits(value)))
    return top, magnitude


@inlined
def _first_with(block: Any, key: Any) -> Any:
    for i in range(block.shape[0]):
        if order_key(as_float(block[i])) == key:
            return i
    return 0


@kernel(fastmath={"contract"})
def _write_masses(block: Any, largest: Any, per_nat: Any, out: Any) -> None:
    """Write exp((logit - largest) * per_nat) of each token of a block, 0 for those without mass to speak of."""
    for i in range(block.shape[0]):
        distance = (as_float(block[i]) - largest) * per_nat
        term = exp32(max(distance, _LOWEST))
        out[i] = term if distance >= _LOWEST else _ZERO


@kernel(fastmath={"reassoc"})
def _sum(values: Any, size: Any) -> Any:
    total = 0.0
    for i in range(size):
        total += np.float64(values[i])
    return total


@kernel
def normalize(row: Any, temperature: Any, masses: Any) -> Any:
    """The largest logit, its first index (or a code), and the sum of exp((logit - largest) / temperature).

    The terms are float32, so that the sum is right to about 1e-7. At temperature 0 there is none.
    """
    best = LOWEST_KEY
    token = NO_TOKEN_LEFT
    total = 0.0
    largest = -np.inf
    per_nat = 1.0 / np.float64(temperature) if temperature > 0 else 0.0
    for start in range(0, row.shape[0], BLOCK):
        block = row[start : start + BLOCK]
        top, magnitude = _top(block)
        if magnitude > INFINITY_BITS or (temperature > 0 and top == INFINITY_BITS):
            return np.nan, NAN_LOGITS, np.nan
        if top > best and top > -INFINITY_BITS:
            before = largest
            token = start + _first_with(block, top)
            best, largest = top, np.float64(as_float(row[token]))
            if total > 0:
                total *= math.exp((before - largest) * per_nat)
        if temperature > 0 and token >= 0:
            value = float_from_bits(np.int32(abs(top)))
            reach = np.float64(-value if top < 0 else value)
            if (reach - largest) * per_nat >= LOWEST_EXPONENT:
                _write_masses(block, np.float32(largest), np.float32(per_nat), masses)
                total += _sum(masses, block.shape[0])
    return largest, token, total


@kernel
def log_normalizer(largest: Any, sums: Any, first: Any, parts: Any, temperature: Any) -> Any:
    """The log-sum-exp at the temperature of what `normalize` found in ranges; the largest logit at temperature 0."""
    most = -np.inf
    for i in range(first, first + parts):
        most = max(most, largest[i])
    if temperature == 0:
        return most
    total = 0.0
    for i in range(first, first + parts):
        if largest[i] > -np.inf:
            total += sums[i] * math.exp((largest[i] - most) / np.float64(temperature))
    return most / np.float64(temperature) + math.log(total)


@region
def normalize_region(block: int) -> None:
    """Largest logit, its token and the sum of masses of each item, with its argument block `Job`."""
    count, parts = word(block, Job.COUNT), word(block, Job.PARTS)
    temperature = float32s(word(block, Job.TEMPERATURE), count)
    scores, sums = float64s(word(block, Job.SCORES), count * parts), float64s(word(block, Job.SUMS), count * parts)
    tokens = int64s(word(block, Job.TOKENS), count * parts)
    masses = np.empty(BLOCK, dtype=np.float32)
    item = next_item(block)
    while item >= 0:
        e, first, end = range_of(block, item)
        address = row_address(block, e, first)
        if word(block, Job.BFLOAT16) != 0:
            largest, token, total = normalize(uint16s(address, end - first), temperature[e], masses)
        else:
            largest, token, total = normalize(float32s(address, end - first), temperature[e], masses)
        scores[item], sums[item] = largest, total
        tokens[item] = token if token < 0 else first + token
        item = next_item(block)


@kernel(fastmath={"contract"})
def _bound_probabilities(block: Any, largest: Any, per_nat: Any, log_sum: Any, bounds: Any) -> None:
    """Write upper bounds of the probabilities of a block."""
    for i in range(block.shape[0]):
        log = (as_float(block[i]) - largest) * per_nat - log_sum
        bounds[i] = exp32(min(max(log, _LOWEST), _ONE)) * _ABOVE + _TINY


@kernel
def _subtract(bounds: Any, probs: Any, share: Any) -> None:
    for i in range(probs.shape[0]):
        bounds[i] -= probs[i] * share


@kernel
def _count_alive(bounds: Any, words: Any, size: Any, best: Any) -> Any:
    """How many tokens may win: w > best * u. Leaves bound - best * u in ``bounds``."""
    factor = np.float32(best * (_UNIFORM * 0.999999))
    alive = np.int32(0)
    for i in range(size):
        ahead = bounds[i] - np.float32(words[i]) * factor
        bounds[i] = ahead
        alive = np.int32(alive + np.int32(ahead > _ZERO))
    return alive


@kernel
def residual_race(
    row: Any,
    probs: Any,
    share: Any,
    first: Any,
    excluded: Any,
    temperature: Any,
    largest: Any,
    normalizer: Any,
    seed: Any,
    position: Any,
    purpose: Any,
    words: Any,
    bounds: Any,
) -> Any:
    """The largest w / E of a range that starts at token ``first``, and its token.

    w is the token's probability less ``share`` times that in ``probs`` (if not empty), not below 0, and 0 for
    ``excluded``.
    """
    k0, k1 = np.uint32(seed), np.uint32(np.uint64(seed) >> _SHIFT)
    p0, p1 = np.uint32(position), np.uint32(np.uint64(position) >> _SHIFT)
    per_nat = np.float32(1.0 / np.float64(temperature))
    log_sum = np.float32(normalizer - np.float64(largest) / np.float64(temperature))
    best, token = 0.0, NO_WEIGHT
    for start in range(0, row.shape[0], BLOCK):
        block = row[start : start + BLOCK]
        size = block.shape[0]
        _bound_probabilities(block, largest, per_nat, log_sum, bounds)
        if probs.shape[0] > 0:
            _subtract(bounds, probs[start : start + BLOCK], np.float32(share))
        if first + start <= excluded < first + start + size:
            bounds[excluded - first - start] = _NEVER
        fill_words(words, first + start, p0, p1, purpose, k0, k1)
        if _count_alive(bounds, words, size, best) == 0:
            continue
        for i in range(size):
            if bounds[i] > _ZERO:
                weight = math.exp(np.float64(as_float(block[i])) / np.float64(temperature) - normalizer)
                if probs.shape[0] > 0:
                    weight -= np.float64(probs[start + i]) * share
                score = weight / -math.log1p(-(np.float64(words[i]) + 0.5) * _UNIFORM)
                if score > best:
                    best, token = score, first + start + i
    return best, token


@region
def recover_region(block: int) -> None:
    """The race over what is left of each item, with its argument block `Job`: SCORES and TOKENS."""
    count, parts, vocab = word(block, Job.COUNT), word(block, Job.PARTS), word(block, Job.VOCAB)
    temperature = float32s(word(block, Job.TEMPERATURE), count)
    normalizers, largest = float64s(word(block, Job.NORMALIZERS), count), float32s(word(block, Job.LARGEST), count)
    seeds, positions = int64s(word(block, Job.SEEDS), count), int64s(word(block, Job.POSITIONS), count)
    excluded, prob_rows = int64s(word(block, Job.EXCLUDED), count), int64s(word(block, Job.PROB_ROWS), count)
    scores = float64s(word(block, Job.SCORES), count * parts)
    tokens = int64s(word(block, Job.TOKENS), count * parts)
    purpose = np.uint32(word(block, Job.PURPOSE))
    words = np.empty(BLOCK, dtype=np.uint32)
    bounds = np.empty(BLOCK, dtype=np.float32)
    item = next_item(block)
    while item >= 0:
        e, first, end = range_of(block, item)
        address = row_address(block, e, first)
        with_probs = prob_rows[e] >= 0
        probs = float32s(
            word(block, Job.PROBS) + 4 * (prob_rows[e] * vocab + first) * with_probs, (end - first) * with_probs
        )
        if word(block, Job.BFLOAT16) != 0:
            score, token = residual_race(
                uint16s(address, end - first), probs, 1.0, first, excluded[e], temperature[e], largest[e],
                normalizers[e], seeds[e], positions[e], purpose, words, bounds,
            )  # fmt: skip
        else:
            score, token = residual_race(
                float32s(address, end - first), probs, 1.0, first, excluded[e], temperature[e], largest[e],
                normalizers[e], seeds[e], positions[e], purpose, words, bounds,
            )  # fmt: skip
        scores[item], tokens[item] = score, token
        item = next_item(block)
