"""Which draft K/V is valid: within a request, and in blocks that requests share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specdec.attention.interface import KVGeometry
from specdec.drafting.kit import DraftState, DraftValidity, SlotTable
from specdec.types import ComputedStep, PackedBatch, TargetOutput

SIZE = 4
TEXT = list(range(100, 130))


def step(
    text: Sequence[int], blocks: Sequence[int], *, computed: int, first: int = 0, preemptions: int = 0, name: str = "a"
) -> tuple[ComputedStep, SlotTable]:
    """A step of one request, as far as validity looks at it."""
    none = torch.empty(0, dtype=torch.int64)
    batch = PackedBatch(
        input_ids=none,
        positions=none,
        slot_mapping=none,
        query_start_loc=none,
        seq_lens=none,
        block_tables=torch.tensor([blocks], dtype=torch.int32),
        logits_indices=none,
        max_query_len=0,
        max_seq_len=0,
    )
    made = ComputedStep(
        batch=batch,
        target=TargetOutput(logits=torch.empty(0, 1)),
        request_ids=(name,),
        token_ids=(np.array(text),),
        num_computed=np.array([computed]),
        first_position=np.array([first]),
        num_preemptions=np.array([preemptions]),
        kept=np.arange(computed - first),
        kept_start=np.array([0, computed - first]),
        samples=np.array([True]),
        finished=np.array([False]),
    )
    return made, SlotTable(made, SIZE, torch.device("cpu"))


def validity(*, share: bool = True, next_token: bool = False) -> DraftValidity:
    return DraftValidity(KVGeometry(16, SIZE), share_prefixes=share, next_token=next_token)


def run(known: DraftValidity, state: DraftState, text: Sequence[int], end: int, tables: SlotTable) -> None:
    known.writing(0, state.num_valid, end, tables)
    known.reached(state, end, 0, np.array(text), tables)


def test_accepted_draft_tokens_stay_valid_and_others_go() -> None:
    """Only as far as the text equals what was drafted, whoever drafted what was verified."""
    known = validity()
    made, tables = step(TEXT[:6], [3, 4, 5], computed=5)
    [state] = known.update(made, tables)
    run(known, state, TEXT[:6], 6, tables)
    for text, computed, expected in (
        ([*TEXT[:6], 1, 2, 3], 8, 8),
        ([*TEXT[:6], 1, 9], 7, 7),
        ([*TEXT[:6], 9], 6, 6),
        ([*TEXT[:6], 1, 2, 3, 4], 9, 9),
    ):
        state.num_valid, state.drafted, state.drafted_from = 6, [1, 2, 3], 6
        made, tables = step(text, [3, 4, 5], computed=computed, first=5)
        assert [s.num_valid for s in known.update(made, tables)] == [expected]
        assert state.drafted == []


def test_a_preempted_request_starts_from_what_its_new_blocks_hold() -> None:
    known = validity()
    made, tables = step(TEXT[:11], [3, 4, 5], computed=10)
    [state] = known.update(made, tables)
    run(known, state, TEXT[:11], 11, tables)
    made, tables = step(TEXT[:11], [3, 4, 7], computed=10, first=8, preemptions=1)
    assert [s.num_valid for s in known.update(made, tables)] == [8]
    made, tables = step(TEXT[:11], [8, 9, 7], computed=10, first=8, preemptions=2)
    assert [s.num_valid for s in known.update(made, tables)] == [0]


def test_a_shared_prefix_is_valid_as_far_as_its_blocks_are_marked() -> None:
    """Marks are by content: the same blocks with another text before them are not valid."""
    known = validity()
    made, tables = step(TEXT, [3, 4, 5, 6], computed=16)
    [state] = known.update(made, tables)
    run(known, state, TEXT, 14, tables)
    known.forget("a")
    made, tables = step([*TEXT[:16], 1], [3, 4, 5, 6], computed=16, first=16, name="b")
    assert [s.num_valid for s in known.update(made, tables)] == [12]
    made, tables = step([0, *TEXT[1:16], 1], [3, 4, 5, 6], computed=16, first=16, name="c")
    assert [s.num_valid for s in known.update(made, tables)] == [0]
    made, tables = step([*TEXT[:16], 1], [3, 4, 5, 6], computed=16, first=8, name="d")
    assert [s.num_valid for s in known.update(made, tables)] == [8]


def test_writing_into_a_block_takes_its_mark() -> None:
    known = validity()
    made, tables = step(TEXT, [3, 4, 5, 6], computed=16)
    [state] = known.update(made, tables)
    run(known, state, TEXT, 16, tables)
    made, tables = step(TEXT, [9, 4, 10], computed=9, name="b")
    known.update(made, tables)
    known.writing(0, 7, 9, tables)
    made, tables = step([*TEXT[:16], 1], [3, 4, 5, 6], computed=16, first=16, name="c")
    assert [s.num_valid for s in known.update(made, tables)] == [4]


def test_without_shared_prefixes_every_request_starts_at_zero() -> None:
    known = validity(share=False)
    made, tables = step(TEXT, [3, 4, 5, 6], computed=16)
    [state] = known.update(made, tables)
    run(known, state, TEXT, 16, tables)
    made, tables = step([*TEXT[:16], 1], [3, 4, 5, 6], computed=16, first=16, name="b")
    assert [s.num_valid for s in known.update(made, tables)] == [0]


def test_marks_may_depend_on_the_next_token() -> None:
    """For layers whose K/V of a position depends on the token after it."""
    for next_token, expected in ((False, 16), (True, 12)):
        known = validity(next_token=next_token)
        made, tables = step(TEXT, [3, 4, 5, 6], computed=16)
        [state] = known.update(made, tables)
        run(known, state, TEXT, 16, tables)
        made, tables = step([*TEXT[:16], 1], [3, 4, 5, 6], computed=16, first=16, name="b")
        assert [s.num_valid for s in known.update(made, tables)] == [expected]
