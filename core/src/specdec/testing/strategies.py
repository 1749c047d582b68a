"""Hypothesis strategies for what proposers, verifiers, backends and schedulers are fed."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st


@st.composite
def texts(draw: st.DrawFn, vocab_size: int = 8, min_size: int = 1, max_size: int = 80) -> np.ndarray:
    """Token ids, int64: arbitrary ones, or pieces that come again, as real texts have them."""
    token = st.integers(0, vocab_size - 1)
    if draw(st.booleans()):
        tokens = draw(st.lists(token, min_size=min_size, max_size=max_size))
    else:
        pieces = draw(st.lists(st.lists(token, min_size=1, max_size=10), min_size=1, max_size=4))
        order = draw(st.lists(st.sampled_from(range(len(pieces))), min_size=1, max_size=max_size))
        tokens = [token for index in order for token in pieces[index]]
        tokens = list(np.resize(tokens, max(min_size, min(len(tokens), max_size))))
    return np.array(tokens, dtype=np.int64)


@st.composite
def growing_texts(draw: st.DrawFn, vocab_size: int = 8, max_size: int = 80) -> tuple[np.ndarray, list[int]]:
    """A text and the increasing lengths at which an engine shows it, the last being all of it."""
    text = draw(texts(vocab_size, max_size=max_size))
    lengths = draw(st.lists(st.integers(1, len(text)), max_size=12))
    return text, sorted({*lengths, len(text)})


@st.composite
def lookup_windows(draw: st.DrawFn, max_length: int = 12) -> tuple[int, int]:
    """Shortest and longest length of an n-gram."""
    shortest = draw(st.integers(1, max_length))
    return shortest, draw(st.integers(shortest, max_length))


@st.composite
def tree_parents(draw: st.DrawFn, max_nodes: int = 10) -> list[int]:
    """Parents of a draft tree's nodes: -1 for the last committed token, parents before children."""
    count = draw(st.integers(0, max_nodes))
    return [draw(st.integers(-1, node - 1)) for node in range(count)]


def chains(vocab_size: int = 8, max_requests: int = 5, max_tokens: int = 5) -> st.SearchStrategy[list[list[int]]]:
    """The draft tokens of some requests."""
    chain = st.lists(st.integers(0, vocab_size - 1), max_size=max_tokens)
    return st.lists(chain, min_size=1, max_size=max_requests)


def attention_lengths(
    max_requests: int = 5, max_cached: int = 20, max_added: int = 8
) -> st.SearchStrategy[list[tuple[int, int]]]:
    """(cached, added) lengths of the requests of a packed batch."""
    pair = st.tuples(st.integers(0, max_cached), st.integers(1, max_added))
    return st.lists(pair, min_size=1, max_size=max_requests)
