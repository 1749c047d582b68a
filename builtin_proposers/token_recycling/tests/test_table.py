"""The table, and drafts read off it, against a straight reading of one path after another."""

import numpy as np
import pytest

from specdec_token_recycling.table import NOTHING, SuccessorTable, TreeReader

TREE = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0), (1, 0, 1))
CHAIN = ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


def known(table: SuccessorTable, token: int) -> list[int]:
    return table.successors[token].tolist()


def test_nothing_is_known_at_first() -> None:
    table = SuccessorTable(6, 2)
    assert all(known(table, token) == [NOTHING, NOTHING] for token in range(6))
    assert table.nbytes == 6 * 2 * 4


def test_what_was_learned_last_counts() -> None:
    table = SuccessorTable(6, 2)
    table.learn(ids(1, 2, 1), np.array([[3, 4], [5, 0], [2, 3]]))
    assert [known(table, token) for token in (1, 2, 3)] == [[2, 3], [5, 0], [NOTHING, NOTHING]]
    table.learn(ids(2), np.array([[1, 4]]))
    assert known(table, 2) == [1, 4]


@pytest.mark.parametrize(("follower", "expected"), [(9, [9, 3, 4]), (3, [3, 4, 5]), (4, [4, 3, 5]), (5, [5, 3, 4])])
def test_a_follower_goes_first_and_is_there_once(follower: int, expected: list[int]) -> None:
    table = SuccessorTable(10, 3)
    table.learn(ids(1, 2), np.array([[3, 4, 5], [6, 7, 8]]))
    table.learn_followers(ids(1), ids(follower))
    assert known(table, 1) == expected
    assert known(table, 2) == [6, 7, 8]


def test_the_last_follower_of_equal_tokens_counts() -> None:
    table = SuccessorTable(10, 1)
    table.learn_followers(ids(1, 2, 1), ids(2, 1, 5))
    assert [known(table, 1), known(table, 2)] == [[5], [1]]


def straight(table: SuccessorTable, paths: tuple[tuple[int, ...], ...], last: int, limit: int) -> dict[int, tuple]:
    """The draft's nodes by path: each (token, path)."""
    found = {}
    for path in sorted(paths, key=lambda path: (len(path), path))[:limit]:
        token = last
        for rank in path:
            token = known(table, token)[rank] if token != NOTHING else NOTHING
        if token != NOTHING:
            found[path] = token
    return found


@pytest.mark.parametrize("paths", [TREE, TREE[::-1], CHAIN, ((0,),)])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_reading(paths: tuple[tuple[int, ...], ...], share: float) -> None:
    rng = np.random.default_rng(len(paths) + int(10 * share))
    reader = TreeReader(paths)
    assert reader.width == 1 + max(rank for path in paths for rank in path)
    table = SuccessorTable(40, reader.width)
    seen = ids(*np.flatnonzero(rng.random(40) < share))
    table.learn(seen, rng.integers(0, 40, (len(seen), reader.width)))
    last, limits = rng.integers(0, 40, 12), rng.integers(0, len(paths) + 2, 12).astype(np.int32)
    tokens, parents, counts = reader.read(table, last, limits)
    assert (tokens.dtype, parents.dtype, counts.dtype) == (np.int64, np.int32, np.int32)
    start = 0
    for request, count in enumerate(counts.tolist()):
        wanted = straight(table, paths, int(last[request]), int(limits[request]))
        place = {path: node for node, path in enumerate(wanted)} | {(): -1}
        assert tokens[start : start + count].tolist() == list(wanted.values())
        assert parents[start : start + count].tolist() == [place[path[:-1]] for path in wanted]
        start += count
    assert start == len(tokens) == len(parents)
    assert share < 1.0 or counts.tolist() == np.minimum(limits, len(paths)).tolist()


def test_no_request() -> None:
    tokens, parents, counts = TreeReader(TREE).read(SuccessorTable(4, 3), ids(), np.empty(0, dtype=np.int32))
    assert len(tokens) == len(parents) == len(counts) == 0
