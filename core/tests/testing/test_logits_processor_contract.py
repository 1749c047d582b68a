"""The contract of logits processors passes a sound one, and catches every planted fault."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.sampling.params import SamplingParams
from specdec.sampling.processor import LogitsProcessor, ProcessorRows
from specdec.testing.contracts import LogitsProcessorContract


class Sound(LogitsProcessor):
    """Takes a token's logit down by how often it came; counts the committed text once."""

    name: ClassVar[str] = "sound"

    def __init__(self) -> None:
        self.counts: dict[str, tuple[int, Counter[int]]] = {}

    def process(self, logits: Tensor, rows: ProcessorRows) -> None:
        for row in range(rows.num_rows):
            request = int(rows.request_index[row])
            counts = self.committed(rows.request_ids[request], rows.token_ids[request]) + self.drafted(rows, row)
            for token, count in counts.items():
                self.change(logits, row, token, count)

    def committed(self, request_id: str, token_ids: np.ndarray) -> Counter[int]:
        seen, counts = self.counts.get(request_id, (0, Counter()))
        if seen > len(token_ids):
            seen, counts = 0, Counter()
        counts.update(token_ids[seen:].tolist())
        self.counts[request_id] = (len(token_ids), counts)
        return counts

    def drafted(self, rows: ProcessorRows, row: int) -> Counter[int]:
        return Counter(rows.drafted[row, : rows.num_drafted[row]].tolist())

    def change(self, logits: Tensor, row: int, token: int, count: int) -> None:
        logits[row, token] -= count

    def forget(self, request_id: str) -> None:
        self.counts.pop(request_id, None)


class TestSound(LogitsProcessorContract):
    @pytest.fixture
    def processor(self) -> LogitsProcessor:
        return Sound()


class Nameless(Sound):
    name: ClassVar[str] = ""


class RefusesEverything(Sound):
    def check(self, params: SamplingParams) -> None:
        raise ValueError("no")


class Idle(Sound):
    def change(self, logits: Tensor, row: int, token: int, count: int) -> None: ...


class ForgetsDrafts(Sound):
    def drafted(self, rows: ProcessorRows, row: int) -> Counter[int]:
        return Counter()


class TreesAsChains(Sound):
    def drafted(self, rows: ProcessorRows, row: int) -> Counter[int]:
        tokens, _ = rows._step.draft_of(rows._indices[int(rows.request_index[row])])
        first = int(rows.row_start[int(rows.request_index[row])])
        return Counter(list(tokens)[: row - first])


class RemembersDrafts(Sound):
    def drafted(self, rows: ProcessorRows, row: int) -> Counter[int]:
        found = super().drafted(rows, row)
        self.counts[rows.request_ids[int(rows.request_index[row])]][1].update(found)
        return Counter()


class CountsTwice(Sound):
    def committed(self, request_id: str, token_ids: np.ndarray) -> Counter[int]:
        seen, counts = self.counts.get(request_id, (0, Counter()))
        counts.update(token_ids[max(0, seen - 1) :].tolist())
        self.counts[request_id] = (len(token_ids), counts)
        return counts


class MixesRequests(Sound):
    def committed(self, request_id: str, token_ids: np.ndarray) -> Counter[int]:
        counts = super().committed(request_id, token_ids)
        return sum((other for _, other in self.counts.values()), Counter()) if len(self.counts) > 1 else counts


class ForgetsNothing(Sound):
    def forget(self, request_id: str) -> None: ...


class ForgetsOnlyWhatItKnows(Sound):
    def forget(self, request_id: str) -> None:
        del self.counts[request_id]


class KeepsOnId(Sound):
    """Lets a new request of an old id go on from the old one's counts."""

    def committed(self, request_id: str, token_ids: np.ndarray) -> Counter[int]:
        return super().committed(request_id, token_ids) + self.old.get(request_id, Counter())

    def __init__(self) -> None:
        super().__init__()
        self.old: dict[str, Counter[int]] = {}

    def forget(self, request_id: str) -> None:
        self.old[request_id] = self.counts.pop(request_id, (0, Counter()))[1]


class MakesNaN(Sound):
    def change(self, logits: Tensor, row: int, token: int, count: int) -> None:
        logits[row, token] = torch.nan


class Returns(Sound):
    def process(self, logits: Tensor, rows: ProcessorRows) -> Any:
        return logits - 1


FAULTS = [
    (Nameless, "test_declares_what_it_is"),
    (RefusesEverything, "test_takes_good_parameters"),
    (Idle, "test_changes_something"),
    (MakesNaN, "test_changes_something"),
    (Returns, "test_changes_something"),
    (ForgetsDrafts, "test_rows_are_those_of_plain_decoding"),
    (TreesAsChains, "test_rows_of_trees"),
    (RemembersDrafts, "test_rejected_drafts_leave_nothing"),
    (CountsTwice, "test_growing_text"),
    (MixesRequests, "test_neighbours_do_not_matter"),
    (KeepsOnId, "test_request_id_used_again"),
    (ForgetsNothing, "test_nothing_kept_after_the_end"),
    (ForgetsOnlyWhatItKnows, "test_nothing_kept_after_the_end"),
]


@pytest.mark.parametrize(("fault", "check"), FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_faults_are_caught(fault: type[Sound], check: str) -> None:
    with pytest.raises((AssertionError, ValueError, KeyError)):
        getattr(LogitsProcessorContract(), check)(fault())


def test_every_check_catches_something() -> None:
    checks = {name for name in vars(LogitsProcessorContract) if name.startswith("test_")}
    assert {check for _, check in FAULTS} == checks


def test_one_that_never_applies_is_skipped() -> None:
    class Never(Sound):
        def applies(self, params: SamplingParams) -> bool:
            return False

    with pytest.raises(pytest.skip.Exception, match="override params"):
        LogitsProcessorContract().test_changes_something(Never())
