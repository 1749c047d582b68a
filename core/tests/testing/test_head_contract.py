"""The contract of draft heads passes those of the packages, and catches every planted fault."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.attention.dense import visible
from specdec.drafting import DraftHead, MaskRow
from specdec.target import bridge
from specdec.testing.attention import attention_layer
from specdec.testing.contracts import DraftHeadContract

V, H, HEADS, DIM = 64, 32, 4, 8


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Sound(DraftHead):
    """One attention layer over a linear of token and hidden state; its parts are what the faults replace."""

    taps = (0, 1)
    draft_vocab_size = V // 2

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> Tensor:
            return 0.3 * torch.randn(shape, generator=generator)

        self.attention_layers = (attention_layer(num_heads=HEADS, num_kv_heads=HEADS, head_dim=DIM),)
        self.target_ids = torch.arange(V // 2) * 2
        self.embed, self.join, self.down = random(V, H), random(H, 2 * H), random(H, 2 * H)
        self.qkv, self.output = random(3 * HEADS * DIM, H), random(V // 2, H)

    def fuse(self, hidden_states: tuple[Tensor, ...]) -> Tensor:
        return F.linear(torch.cat(hidden_states, -1), self.down)

    def forward(self, token_ids: Tensor, hidden_states: Tensor, positions: Tensor, step: int) -> Tensor:
        x = F.linear(torch.cat([self.embed[token_ids], hidden_states], -1), self.join)
        query, key, value = F.linear(x, self.qkv).view(len(x), 3, HEADS, DIM).unbind(1)
        return x + self.attend(query, key, value, positions).flatten(1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> Tensor:
        return bridge.attend(0, query, key, value)

    def logits(self, hidden_states: Tensor) -> Tensor:
        return F.linear(hidden_states, self.output)

    def memory(self) -> dict[str, int]:
        return {"weights": self.output.nbytes}


class TestSound(DraftHeadContract):
    @pytest.fixture
    def head(self) -> DraftHead:
        return Sound()


class TestParallel(DraftHeadContract):
    @pytest.fixture
    def head(self) -> DraftHead:
        head = Sound()
        head.mask_row = MaskRow(3, (torch.ones(1, H), torch.zeros(1, H)))
        return head


# --- faults ---------------------------------------------------------------------------------------


class TapsTooHigh(Sound):
    taps = (0, 2)


class CountsLayersFromOne(Sound):
    def __init__(self) -> None:
        super().__init__()
        self.attention_layers = (attention_layer(index=1, num_heads=HEADS, num_kv_heads=HEADS, head_dim=DIM),)


class MapsOutOfTheVocabulary(Sound):
    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids + V - 1


class MapsTwoToOne(Sound):
    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids // 2


class OtherWidth(Sound):
    def forward(self, token_ids: Tensor, hidden_states: Tensor, positions: Tensor, step: int) -> Tensor:
        return super().forward(token_ids, hidden_states, positions, step)[:, :-1]


class LogitsOfTheTarget(Sound):
    def logits(self, hidden_states: Tensor) -> Tensor:
        return F.linear(hidden_states, self.embed)


class FailsOnItsOwnOutput(Sound):
    def forward(self, token_ids: Tensor, hidden_states: Tensor, positions: Tensor, step: int) -> Tensor:
        return super().forward(token_ids, hidden_states, positions, step) / (step == 0)


class MasksOneTap(Sound):
    mask_row = MaskRow(3, (torch.ones(1, H),))


class SeesTheFuture(Sound):
    def attend(self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> Tensor:
        return super().attend(query, key, value, positions) + value.mean(0)


class IgnoresTokens(Sound):
    def forward(self, token_ids: Tensor, hidden_states: Tensor, positions: Tensor, step: int) -> Tensor:
        return super().forward(token_ids * 0, hidden_states, positions, step)


class IgnoresOneTap(Sound):
    def fuse(self, hidden_states: tuple[Tensor, ...]) -> Tensor:
        return super().fuse((hidden_states[0], hidden_states[0]))


class Remembers(Sound):
    last: Any = 0.0

    def forward(self, token_ids: Tensor, hidden_states: Tensor, positions: Tensor, step: int) -> Tensor:
        out = super().forward(token_ids, hidden_states, positions, step) + self.last
        self.last = out[-1]
        return out


class WritesItsInput(Sound):
    def forward(self, token_ids: Tensor, hidden_states: Tensor, positions: Tensor, step: int) -> Tensor:
        out = super().forward(token_ids, hidden_states, positions, step)
        hidden_states.mul_(2)
        return out


class AttendsOverTheBatch(Sound):
    """Attends by itself, over whatever rows are there."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> Tensor:
        order = torch.arange(len(query))
        weights = (torch.einsum("qhd,khd->hqk", query, key) * DIM**-0.5).masked_fill(~visible(order, order), -torch.inf)
        return torch.einsum("hqk,khd->qhd", weights.softmax(-1), value)


class NamesNoBytes(Sound):
    def memory(self) -> dict[str, int]:
        return {"weights": "much"}  # type: ignore[dict-item]


FAULTS = [
    (TapsTooHigh, "test_declares_what_it_is"),
    (CountsLayersFromOne, "test_declares_what_it_is"),
    (MapsOutOfTheVocabulary, "test_maps_to_target_ids"),
    (MapsTwoToOne, "test_maps_to_target_ids"),
    (OtherWidth, "test_form"),
    (LogitsOfTheTarget, "test_form"),
    (FailsOnItsOwnOutput, "test_runs_on_its_own_output"),
    (MasksOneTap, "test_mask_row_is_what_fuse_takes"),
    (SeesTheFuture, "test_sees_the_past_alone"),
    (IgnoresTokens, "test_reads_tokens_and_hidden_states"),
    (IgnoresOneTap, "test_reads_tokens_and_hidden_states"),
    (Remembers, "test_same_input_same_output"),
    (WritesItsInput, "test_inputs_unchanged"),
    (AttendsOverTheBatch, "test_batch_equals_singles"),
    (AttendsOverTheBatch, "test_steps_continue_each_other"),
    (NamesNoBytes, "test_memory_is_reported"),
]


@pytest.mark.parametrize(("fault", "check"), FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_faults_are_caught(fault: type[Sound], check: str) -> None:
    arguments = {"test_form": {"count": 7}}.get(check, {})
    with pytest.raises((AssertionError, RuntimeError)):
        getattr(DraftHeadContract(), check)(fault(), **arguments)


def test_every_check_catches_something() -> None:
    checks = {name for name in vars(DraftHeadContract) if name.startswith("test_")}
    assert {check for _, check in FAULTS} == checks
