"""Noise that is a pure function of (seed, position, purpose, token id), on any device.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) turns

    key      (seed low, seed high)                                        32-bit words
    counter  (token id // 4, position low, position high, purpose)

into four 32-bit words; token id ``4 c + j`` takes word j. Nothing else enters: not the batch, not the method, not how
many tokens were drafted. A word r gives the uniform ``u = (r + 0.5) / 2**32``, strictly between 0 and 1, and the
exponential ``E = -log(1 - u)``. Sampling is the exponential race in its Gumbel form: the token with the largest
``logit / temperature - log E`` is a draw from the softmax (Yellott 1977), the lowest token id on ties. Scores are
float64, so that no rounding of the noise distorts the odds of unlikely tokens and every implementation of the race
finds the same winner.

This is the reference, in plain torch. `specdec.sampling.cpu.choose` is the fast path for CPUs; its tests hold it to
these words and winners.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.sampling.codes import Purpose as Purpose

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_CHUNK_BYTES = 64 << 20


def _round(counter: list[Tensor], key: tuple[int | Tensor, int | Tensor]) -> list[Tensor]:
    c0, c1, c2, c3 = counter
    # int64 products wrap modulo 2**64, which leaves all 64 bits as they should be.
    p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
    return [
        ((p1 >> 32) & _MASK) ^ c1 ^ key[0],
        p1 & _MASK,
        ((p0 >> 32) & _MASK) ^ c3 ^ key[1],
        p0 & _MASK,
    ]


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Ten rounds of Philox4x32 on int64 tensors that hold 32-bit words and broadcast with one another."""
    words = list(counter)
    for i in range(10):
        words = _round(words, ((key[0] + i * _WEYL[0]) & _MASK, (key[1] + i * _WEYL[1]) & _MASK))
    return tuple(words)


def random_words(seeds: Tensor, positions: Tensor, num_tokens: int, purpose: int | Tensor = Purpose.SAMPLE) -> Tensor:
    """The 32-bit words of tokens 0 .. ``num_tokens`` - 1 for each row.

    Args:
        seeds: int64 [R], the bits of 64-bit seeds.
        positions: int64 [R].
        num_tokens: how many token ids.
        purpose: the stream; int64 [R] when rows differ.

    Returns:
        int64 [R, num_tokens], values below 2**32.
    """
    seeds, positions = seeds[:, None], positions[:, None]
    index = torch.arange((num_tokens + 3) // 4, device=seeds.device)[None]
    if isinstance(purpose, Tensor):
        stream = purpose[:, None]
    else:
        stream = torch.full((1, 1), int(purpose), dtype=torch.int64, device=seeds.device)
    counter = (index, positions & _MASK, (positions >> 32) & _MASK, stream)
    words = torch.stack(philox(counter, (seeds & _MASK, (seeds >> 32) & _MASK)), dim=-1)
    return words.flatten(1)[:, :num_tokens]


def uniforms(seeds: Tensor, positions: Tensor, num_tokens: int = 1, purpose: int | Tensor = Purpose.ACCEPT) -> Tensor:
    """float64 [R, num_tokens] strictly between 0 and 1; arguments as for `random_words`."""
    return (random_words(seeds, positions, num_tokens, purpose).double() + 0.5) * 2.0**-32


def uniform_at(seeds: Tensor, positions: Tensor, index: Tensor, purpose: int = Purpose.ACCEPT) -> Tensor:
    """float64 [R]: entry ``index[r]`` (int64) of each row of `uniforms`."""
    stream = torch.full_like(index, int(purpose))
    counter = (index >> 2, positions & _MASK, (positions >> 32) & _MASK, stream)
    words = torch.stack(philox(counter, (seeds & _MASK, (seeds >> 32) & _MASK)), dim=-1)
    return (words.gather(1, (index & 3)[:, None])[:, 0].double() + 0.5) * 2.0**-32


def exponentials(seeds: Tensor, positions: Tensor, num_tokens: int, purpose: int | Tensor = Purpose.SAMPLE) -> Tensor:
    """float64 [R, num_tokens], Exp(1), finite and above 0; arguments as for `random_words`."""
    return -torch.log1p(-uniforms(seeds, positions, num_tokens, purpose))


def race(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, purpose: int | Tensor = Purpose.SAMPLE
) -> tuple[Tensor, Tensor]:
    """Draw one token per row from ``softmax(logits / temperature)``.

    Args:
        logits: [R, V], any float dtype.
        temperature: float32 [R], above 0.
        seeds: int64 [R].
        positions: int64 [R].
        purpose: the stream; int64 [R] when rows differ.

    Returns:
        The winners, int64 [R], and their scores, float64 [R]; a NaN in a row makes its score NaN.
    """
    num_rows, vocab_size = logits.shape
    step = max(1, _CHUNK_BYTES // (8 * max(vocab_size, 1)))
    winners = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    scores = torch.empty(num_rows, dtype=torch.float64, device=logits.device)
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        stream = purpose[rows] if isinstance(purpose, Tensor) else purpose
        noise = exponentials(seeds[rows], positions[rows], vocab_size, stream)
        score = logits[rows].double() / temperature[rows, None].double() - noise.log()
        winners[rows] = score.argmax(dim=-1)
        scores[rows] = score.gather(1, winners[rows, None])[:, 0]
    return winners, scores


def derive_seed(seed: int, *parts: int) -> int:
    """A 64-bit seed made from another and from numbers such as the index among ``n`` outputs.

    SplitMix64's finaliser (Steele et al. 2014) mixes each part in, so that neighbouring seeds give unrelated noise.
    """
    mixed = seed & (2**64 - 1)
    for part in parts:
        mixed = (mixed + (part + 1) * 0x9E3779B97F4A7C15) & (2**64 - 1)
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        mixed ^= mixed >> 31
    return mixed
