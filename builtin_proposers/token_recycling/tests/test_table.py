"""The table, and drafts read off it, against dictionaries and a straight reading of one path after another."""

from __future__ import annotations

import numpy as np
import pytest

from specdec_token_recycling import table as table_module
from specdec_token_recycling.table import NOTHING, SuccessorTable, TreeReader

TREE = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0), (1, 0, 1))
CHAIN = ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))
ONE = ((0,),)


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def first_level(table: SuccessorTable, *last_two: int) -> list[int]:
    """What is known behind the end of a text."""
    reader = TreeReader(tuple((rank,) for rank in range(table.width)))
    return reader.read(table, np.array([last_two]), np.array([table.width], dtype=np.int32))[0].tolist()


def behind_one(table: SuccessorTable, token: int) -> list[int]:
    return first_level(table, NOTHING, token)


class Reference:
    """The same, as it is explained: rows by token and by pair, the tokens of each in order."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.rows: dict[tuple[int, ...], list[int]] = {}

    def learn(self, before: int, token: int, likeliest: list[int]) -> None:
        for key in ((token,), (before, token)):
            if NOTHING not in key:
                self.rows[key] = list(likeliest)

    def learn_follower(self, before: int, token: int, follower: int) -> None:
        single = self.rows.get((token,), [])
        for key in ((before, token), (token,)):
            if NOTHING not in key:
                others = [known for known in self.rows.get(key, single) if known != follower]
                self.rows[key] = [follower, *others][: self.width]

    def draft(self, paths: tuple[tuple[int, ...], ...], last_two: list[int], limit: int) -> dict[tuple, int]:
        """The draft's tokens by path."""
        found: dict[tuple, int] = {}
        for path in sorted(paths, key=lambda path: (len(path), path))[:limit]:
            above = [*last_two, *(found.get(path[:depth], NOTHING) for depth in range(1, len(path)))]
            row = self.rows.get(tuple(above[-2:]))
            if row is None and len(path) == 1:
                row = self.rows.get((last_two[1],))
            if row is not None and len(row) > path[-1]:
                found[path] = row[path[-1]]
        return found


def test_nothing_is_known_at_first() -> None:
    table = SuccessorTable(6, 2)
    assert all(behind_one(table, token) == [] for token in range(6))
    assert table.nbytes == (6 + table_module.NUM_PAIRS) * 2 * 4 + table_module.NUM_PAIRS * 8


def test_what_was_learned_last_counts() -> None:
    table = SuccessorTable(6, 2)
    table.learn(ids(0, 1, 0), ids(1, 2, 1), np.array([[3, 4], [5, 0], [2, 3]]))
    assert [behind_one(table, token) for token in (1, 2, 3)] == [[2, 3], [5, 0], []]
    table.learn(ids(4), ids(1), np.array([[1, 0]]))
    assert (first_level(table, 0, 1), first_level(table, 4, 1), first_level(table, 5, 1)) == ([2, 3], [1, 0], [1, 0])


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize(("follower", "expected"), [(9, [9, 3, 4]), (3, [3, 4, 5]), (4, [4, 3, 5]), (5, [5, 3, 4])])
def test_a_follower_goes_first_and_is_there_once(start: int, follower: int, expected: list[int]) -> None:
    table = SuccessorTable(10, 3)
    table.learn(ids(NOTHING, NOTHING), ids(1, 2), np.array([[3, 4, 5], [6, 7, 8]]))
    table.learn_text(ids(2, 1, follower), start)
    assert behind_one(table, 1) == first_level(table, 2, 1) == expected
    assert behind_one(table, 2) == ([6, 7, 8] if start else [1, 6, 7])


def test_a_place_belongs_to_the_pair_written_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two pairs have one place, the older one is forgotten, not taken for the newer."""
    monkeypatch.setattr(table_module, "NUM_PAIRS", 1)
    table = SuccessorTable(10, 1)
    table.learn(ids(1), ids(2), np.array([[3]]))
    table.learn(ids(4), ids(2), np.array([[5]]))
    table.learn(ids(NOTHING), ids(2), np.array([[6]]))
    assert (first_level(table, 4, 2), first_level(table, 1, 2)) == ([5], [6])


@pytest.mark.parametrize("paths", [TREE, TREE[::-1], CHAIN, ONE])
@pytest.mark.parametrize("vocab_size", [3, 8, 40])
def test_drafts_of_what_was_learned(paths: tuple[tuple[int, ...], ...], vocab_size: int) -> None:
    """Rows and texts in turn; drafts of every length, behind texts of one token and more."""
    rng = np.random.default_rng(vocab_size)
    reader = TreeReader(paths)
    assert reader.width == 1 + max(rank for path in paths for rank in path)
    table, reference = SuccessorTable(vocab_size, reader.width), Reference(reader.width)
    num_nodes = 0
    for _ in range(12):
        before, tokens = rng.integers(-1, vocab_size, 6), rng.integers(0, vocab_size, 6)
        likeliest = np.array([rng.permutation(max(vocab_size, reader.width))[: reader.width] for _ in tokens])
        table.learn(before, tokens, likeliest)
        for row in zip(before.tolist(), tokens.tolist(), likeliest.tolist(), strict=True):
            reference.learn(*row)
        text, start = rng.integers(0, vocab_size, 9), int(rng.integers(0, 3))
        table.learn_text(text, start)
        for i in range(start, 8):
            reference.learn_follower(int(text[i - 1]) if i else NOTHING, int(text[i]), int(text[i + 1]))
        last_two = np.stack([rng.integers(-1, vocab_size, 12), rng.integers(0, vocab_size, 12)], axis=1)
        limits = rng.integers(0, len(paths) + 2, 12).astype(np.int32)
        num_nodes += compare(reader.read(table, last_two, limits), reference, paths, last_two, limits)
    assert num_nodes > 50


def compare(read: tuple, reference: Reference, paths: tuple, last_two: np.ndarray, limits: np.ndarray) -> int:
    """Require the reference's drafts; return how many nodes they have."""
    tokens, parents, counts = read
    assert (tokens.dtype, parents.dtype, counts.dtype) == (np.int64, np.int32, np.int32)
    start = 0
    for request, count in enumerate(counts.tolist()):
        wanted = reference.draft(paths, last_two[request].tolist(), int(limits[request]))
        place = {path: node for node, path in enumerate(wanted)} | {(): -1}
        assert tokens[start : start + count].tolist() == list(wanted.values())
        assert parents[start : start + count].tolist() == [place[path[:-1]] for path in wanted]
        start += count
    assert start == len(tokens) == len(parents)
    return start


def test_no_request() -> None:
    nothing = np.empty((0, 2), dtype=np.int64), np.empty(0, dtype=np.int32)
    tokens, parents, counts = TreeReader(TREE).read(SuccessorTable(4, 3), *nothing)
    assert len(tokens) == len(parents) == len(counts) == 0
