"""min-p, top-k and top-p of `specdec.sampling.truncation` without sorting the vocabulary.

Every row ends with a cutoff ``(logit, token id)``: what ranks behind it is dropped.

* top-k keeps a heap of the k best (logit, id) keys; a span of tokens whose largest logit is not above the heap's worst
  is passed over.
* top-p without top-k takes two passes: the total mass, then a histogram (mass by distance from the largest logit, 64
  buckets per nat) of the tokens that could be inside; only the bucket in which the mass is reached is put in order.
  Tokens so unlikely that all of them together weigh less than ``1 - top_p`` are left out from the start.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from specdec.cpu.compile import compiled
from specdec.cpu.simd import inlined, kernel
from specdec.sampling.cpu.bits import (
    INFINITY_BITS,
    LOWEST_KEY,
    float_from_bits,
    magnitude_bits,
    order_key,
)
from specdec.sampling.cpu.exponential import LOWEST_EXPONENT, exp, total_of
from specdec.sampling.cpu.job import BLOCK
from specdec.sampling.cpu.rank import best_keys, rank_key, sift_down, token_of

_SPAN = 64
_BUCKETS = 2048
_BUCKETS_PER_NAT = 64.0


@kernel
def _largest(row: Any) -> Any:
    """The key of the row's largest logit, and whether the row has NaN."""
    top = LOWEST_KEY
    magnitude = np.int32(0)
    for i in range(row.shape[0]):
        top = np.int32(max(top, order_key(row[i])))
        magnitude = np.int32(max(magnitude, magnitude_bits(row[i])))
    return top, magnitude > INFINITY_BITS


@inlined
def _value_of(key: Any) -> Any:
    """The float64 value of an order key."""
    magnitude = np.float64(float_from_bits(np.int32(abs(key))))
    return -magnitude if key < 0 else magnitude


@inlined
def _mass_of(row: Any, token: Any, largest: Any, temperature: Any) -> Any:
    return math.exp((np.float64(row[token]) - largest) / temperature)


@kernel
def _end_of_ranked(row: Any, keys: Any, largest: Any, temperature: Any, top_p: Any, margin: Any, lowest: Any) -> Any:
    """The last of the ranked ``keys`` that min-p and top-p keep."""
    size = 0
    total = 0.0
    while size < keys.shape[0] and row[token_of(keys[size])] >= lowest:
        total += _mass_of(row, token_of(keys[size]), largest, temperature)
        size += 1
    if top_p >= 1:
        return keys[size - 1]
    before = _mass_of(row, token_of(keys[0]), largest, temperature)
    rank = 1
    while rank < size and before < (top_p - margin) * total:
        before += _mass_of(row, token_of(keys[rank]), largest, temperature)
        rank += 1
    return keys[rank - 1]


@kernel(fastmath={"contract"})
def _masses(row: Any, largest: Any, temperature: Any, lowest: Any, mass: Any) -> Any:
    """Write exp(distance) of each token, 0 where the logit is below ``lowest`` or too far off, and return the sum."""
    lowest = max(lowest, np.float32(largest + LOWEST_EXPONENT * temperature))
    per_nat = 1.0 / temperature
    total = 0.0
    for start in range(0, row.shape[0], BLOCK):
        block = row[start : start + BLOCK]
        out = mass[start : start + BLOCK]
        alive = np.int32(0)
        for i in range(block.shape[0]):
            alive = np.int32(alive + np.int32(block[i] >= lowest))
        if alive == 0:
            out[:] = 0.0
            continue
        for i in range(block.shape[0]):
            term = exp(max((np.float64(block[i]) - largest) * per_nat, LOWEST_EXPONENT))
            out[i] = term if block[i] >= lowest else 0.0
        total += total_of(out)
    return total


@kernel
def _tokens_with(mass: Any, least: Any, tokens: Any) -> Any:
    """Write the tokens of at least this mass, in order, and return how many there are."""
    count = 0
    for start in range(0, mass.shape[0], _SPAN):
        span = mass[start : start + _SPAN]
        alive = np.int32(0)
        for i in range(span.shape[0]):
            alive = np.int32(alive + np.int32(span[i] >= least))
        if alive == 0:
            continue
        for i in range(span.shape[0]):
            tokens[count] = start + i
            count += span[i] >= least
    return count


@inlined
def _bucket(logit: Any, largest: Any, buckets_per_logit: Any) -> Any:
    return min(np.int64((largest - np.float64(logit)) * buckets_per_logit), _BUCKETS - 1)


@kernel
def _end_of_nucleus(
    row: Any, largest: Any, temperature: Any, top_p: Any, margin: Any, lowest: Any, mass: Any, tokens: Any
) -> Any:
    """The rank key of the last token that top-p keeps, among logits of at least ``lowest``.

    ``mass`` float64 [V] and ``tokens`` int64 [V + 1] are room to work in.
    """
    total = _masses(row, largest, temperature, lowest, mass)
    wanted = (top_p - margin) * total
    # What is lighter than this weighs less than 1 - top_p all together, so the end comes before it.
    least = (1.0 - top_p) * total / row.shape[0]
    candidates = tokens[: _tokens_with(mass, least, tokens)]
    buckets_per_logit = _BUCKETS_PER_NAT / temperature
    histogram = np.zeros(_BUCKETS, dtype=np.float64)
    for v in candidates:
        histogram[_bucket(row[v], largest, buckets_per_logit)] += mass[v]
    end = 0
    before = 0.0
    while end < _BUCKETS - 1 and before + histogram[end] < wanted:
        before += histogram[end]
        end += 1
    count = 0
    # A heap of the bucket's keys, the best first: negated, because the smallest is on top.
    keys = np.empty(candidates.shape[0], dtype=np.int64)
    for v in candidates:
        keys[count] = -rank_key(row[v], v)
        count += _bucket(row[v], largest, buckets_per_logit) == end
    for i in range(count // 2 - 1, -1, -1):
        sift_down(keys, i, count, keys[i])
    before += mass[token_of(-keys[0])]
    while count > 1 and before < wanted:
        count -= 1
        sift_down(keys, 0, count, keys[count])
        before += mass[token_of(-keys[0])]
    return -keys[0]


@kernel
def _lowest_logit(largest: Any, temperature: Any, log_min_p: Any) -> Any:
    """The lowest float32 logit that min-p keeps: (logit - largest) / temperature >= log_min_p."""
    if log_min_p == -np.inf:
        return np.float32(-np.inf)
    lowest = np.float32(largest + log_min_p * temperature)
    # Rounding may have put it a few float32 steps to either side of the limit.
    while (np.float64(lowest) - largest) / temperature >= log_min_p:
        lowest = np.float32(_value_of(order_key(lowest) - 1))
    while (np.float64(lowest) - largest) / temperature < log_min_p:
        lowest = np.float32(_value_of(order_key(lowest) + 1))
    return lowest


@kernel
def _drop_after(row: Any, last: Any) -> None:
    """Mask every token that ranks behind the key ``last``."""
    value = np.int32(last >> np.int64(32))
    token = np.int32(token_of(last))
    for v in range(row.shape[0]):
        key = order_key(row[v])
        stays = key > value or (key == value and np.int32(v) <= token)
        row[v] = row[v] if stays else np.float32(-np.inf)


@kernel
def _drop_below(row: Any, lowest: Any) -> None:
    for v in range(row.shape[0]):
        row[v] = row[v] if row[v] >= lowest else np.float32(-np.inf)


@compiled("void(float32[:,::1], int64[::1], int64[::1], float32[::1], int64[::1], float64[::1], float64[::1], float64)")
def truncate_rows(
    logits: Any, rows: Any, request_index: Any, temperatures: Any, top_k: Any, top_p: Any, log_min_p: Any, margin: Any
) -> None:
    """Change the given rows in place.

    Args:
        logits: [R, V].
        rows: [P].
        request_index: [R].
        temperatures: [B], above 0 for the rows given.
        top_k: [B]; 0 is off.
        top_p: [B]; 1 is off.
        log_min_p: [B]; -inf is off.
        margin: `specdec.sampling.truncation.MASS_MARGIN`.
    """
    mass = np.empty(logits.shape[1], dtype=np.float64)
    tokens = np.empty(logits.shape[1] + 1, dtype=np.int64)
    for r in rows:
        row = logits[r]
        request = request_index[r]
        temperature = np.float64(temperatures[request])
        key, faulty = _largest(row)
        if faulty or key == INFINITY_BITS or key == -INFINITY_BITS:
            continue
        largest = _value_of(key)
        lowest = _lowest_logit(largest, temperature, log_min_p[request])
        if 0 < top_k[request] < row.shape[0]:
            keys = best_keys(row, top_k[request])
            _drop_after(row, _end_of_ranked(row, keys, largest, temperature, top_p[request], margin, lowest))
        elif top_p[request] < 1:
            _drop_after(row, _end_of_nucleus(row, largest, temperature, top_p[request], margin, lowest, mass, tokens))
        else:
            _drop_below(row, lowest)
