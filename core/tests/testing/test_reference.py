"""The references agree with what is known otherwise."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings

from specdec.testing import tiny_module
from specdec.testing.attention import attention_case, attention_layer
from specdec.testing.holders import reaches_string
from specdec.testing.reference import (
    attention_reference,
    greedy_reference,
    match_reference,
    ngram_reference,
    visible_slots,
)
from specdec.testing.strategies import attention_lengths, chains, growing_texts, lookup_windows, texts, tree_parents

torch.set_num_threads(1)


def test_attention_of_a_prefill_is_torchs() -> None:
    """A prefill over an empty cache is plain causal attention."""
    layer = attention_layer()
    case = attention_case([(0, 9)], layer)
    kv = case.cache.layers[0]
    kv.keys[case.batch.slot_mapping], kv.values[case.batch.slot_mapping] = case.key, case.value
    got = attention_reference(case.batch, kv, 4, case.query, layer)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(part.transpose(0, 1)[None].double() for part in (case.query, case.key, case.value)),
        is_causal=True,
        enable_gqa=True,
    )
    torch.testing.assert_close(got, want[0].transpose(0, 1))


def test_visible_slots_of_windows_chunks_and_trees() -> None:
    """Who sees whom, counted by hand."""

    def counts(parents: list[list[int]] | None = None, **layer: int) -> list[int]:
        case = attention_case([(3, 4)], attention_layer(**layer), parents=parents)
        return [len(slots) for slots in visible_slots(case.batch, 4, case.layer)]

    assert counts() == [4, 5, 6, 7]
    assert counts(sliding_window=2) == [2, 2, 2, 2]
    assert counts(chunk_size=5) == [4, 5, 1, 2]
    assert counts([[-1, 0, 0, 1]]) == [4, 5, 5, 6]
    assert counts([[-1, 0, 0, 1]], sliding_window=3) == [3, 3, 3, 3]


@given(attention_lengths())
@settings(deadline=None, max_examples=25)
def test_cases_have_slots_of_their_own(lengths: list[tuple[int, int]]) -> None:
    """No two tokens of a case share a slot, and every token sees its own."""
    case = attention_case(lengths, attention_layer())
    slots = case.batch.slot_mapping.tolist()
    assert len(set(slots)) == len(slots)
    seen = visible_slots(case.batch, 4, case.layer)
    assert all(own in row and len(set(row)) == len(row) for own, row in zip(slots, seen, strict=True))


def test_greedy_is_generate() -> None:
    """Decoding without a cache gives what `generate` gives."""
    model = tiny_module("llama")
    prompt = torch.tensor([[5, 6, 7, 8]])
    want = model.generate(prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False, attention_mask=prompt > 0)
    tokens, gaps = greedy_reference(model, [5, 6, 7, 8], 8)
    assert tokens == want[0, 4:].tolist()
    assert all(gap > 0 for gap in gaps)


def test_match() -> None:
    """Chains stop at the first difference; trees follow the branch that was sampled."""
    assert match_reference([4, 5, 6], [4, 9]) == [0]
    assert match_reference([4, 5, 6], [4, 5]) == [0, 1]
    assert match_reference([4], []) == []
    assert match_reference([8, 0, 7, 0, 0], [9, 8, 7, 7], [-1, -1, 0, 1]) == [1, 3]


def test_ngram() -> None:
    """The longest suffix first, then the latest with enough after it, then the earliest."""
    assert ngram_reference([1, 2, 3, 1, 2], 1, 5, 2) == [3, 1]
    assert ngram_reference([1, 9, 1, 8, 1], 1, 1, 2) == [8, 1]
    assert ngram_reference([1, 9, 1, 8, 1], 1, 1, 4) == [9, 1, 8, 1]
    assert ngram_reference([1, 2, 3], 1, 2, 2) == []
    assert ngram_reference([1], 1, 2, 2) == []


def test_reaches_string() -> None:
    """Containers, attributes and keys are looked through; classes are not."""

    class Holder:
        shared = "in the class"

        def __init__(self) -> None:
            self.parts = [{"a key": ("deep", {"deeper": {"the text"}})}]

    assert reaches_string(Holder(), "the text")
    assert reaches_string(Holder(), "a key")
    assert not reaches_string(Holder(), "in the class")
    assert not reaches_string(Holder(), "elsewhere")


@given(growing_texts(), lookup_windows(), tree_parents(), chains(), texts(min_size=3))
@settings(max_examples=50)
def test_strategies(shown: Any, window: Any, parents: list[int], drafts: Any, text: Any) -> None:
    """What the strategies promise."""
    whole, lengths = shown
    assert lengths == sorted(set(lengths))
    assert lengths[0] >= 1
    assert lengths[-1] == len(whole)
    assert 1 <= window[0] <= window[1]
    assert all(-1 <= parent < node for node, parent in enumerate(parents))
    assert drafts
    assert len(text) >= 3
