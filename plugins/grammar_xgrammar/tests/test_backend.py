"""The backend against texts: what is accepted, what is masked, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest

from specdec.errors import PluginUnsuitableError
from specdec.grammar import GrammarSpec, RequestGrammar, StructuredOutputsParams, bitmask_width
from specdec.testing.tokenizers import tiny_tokenizer
from specdec.types import EngineContext, TargetInfo
from specdec_grammar_xgrammar.backend import XGrammarBackend
from specdec_grammar_xgrammar.config import XGrammarConfig

VOCAB, END = 512, 1
Make = Callable[..., XGrammarBackend]


def context(tokenizer: Any, vocab_size: int = VOCAB, ends: tuple[int, ...] = (END,)) -> EngineContext:
    info = TargetInfo(
        model="tiny",
        model_type="llama",
        path=None,
        hf_config=None,
        vocab_size=vocab_size,
        hidden_size=8,
        num_layers=1,
        max_position_embeddings=64,
        eos_token_ids=ends,
    )
    return EngineContext(
        target_info=info,
        device="cpu",
        dtype="float32",
        max_model_len=64,
        max_num_seqs=4,
        num_speculative_tokens=0,
        block_size=16,
        seed=0,
        tokenizer=tokenizer,
    )


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer(VOCAB)


@pytest.fixture(scope="module")
def backend(tokenizer: Any) -> XGrammarBackend:
    return XGrammarBackend(XGrammarConfig(), context(tokenizer))


def spec_of(**given: Any) -> GrammarSpec:
    return StructuredOutputsParams(**given).spec()


def takes(backend: XGrammarBackend, tokenizer: Any, text: str, **given: Any) -> bool:
    """Whether the text is a whole output."""
    matcher = backend.compile(spec_of(**given)).matcher()
    return all(map(matcher.accept, tokenizer.encode(text, add_special_tokens=False))) and matcher.accept(END)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("given", "right", "wrong"),
    [
        (
            {"json": SCHEMA},
            ['{"a": 1}', '{\n  "a":-3,"b" : "y"}'],
            ["{}", '{"a": "1"}', '{"b": "x"}', '{"a": 1, "c": 2}'],
        ),
        ({"json": SCHEMA, "disable_any_whitespace": True}, ['{"a": 1, "b": "x"}'], ['{"a":1}', '{ "a": 1}']),
        ({"json_object": True}, ["{}", '{"x": [1, {"y": null}]}'], ["[]", "3", '{"x"}']),
        ({"regex": "[a-c]+[0-9]{2}"}, ["abc12", "a00"], ["12", "abc1", "abcd12"]),
        ({"choice": ["yes", 'say "no"', "a\\b\nc"]}, ["yes", 'say "no"', "a\\b\nc"], ["ye", "no", ""]),
        ({"grammar": 'root ::= "(" root ")" | "x"'}, ["x", "((x))"], ["(x", ")x("]),
    ],
)
def test_texts(
    backend: XGrammarBackend, tokenizer: Any, given: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    for text in right:
        assert takes(backend, tokenizer, text, **given), text
    for text in wrong:
        assert not takes(backend, tokenizer, text, **given), text


ONE_OF = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}, "c": {"type": "integer"}},
    "required": ["c"],
    "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
}
LISTED = {"type": "string", "pattern": "^(red|green|ultramarine)$", "maxLength": 6}


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (ONE_OF, ['{"a": 1, "c": 2}', '{"b": 1, "c": 2}'], ['{"c": 1}', '{"a": 1, "b": 1, "c": 2}', '{"a": 1}']),
        ({**ONE_OF, "oneOf": None, "anyOf": ONE_OF["oneOf"]}, ['{"a": 1, "b": 1, "c": 2}'], ['{"c": 1}']),
        (LISTED, ['"red"', '"green"'], ['"ultramarine"', '"blue"']),
        ({"type": "array", "minItems": 1}, ['[1, "a"]'], ["[]"]),
        (
            {"type": "object", "properties": {"x": ONE_OF, "pattern": LISTED}},
            ['{"pattern": "red"}'],
            ['{"x": {"c": 1}}'],
        ),
    ],
)
def test_schemas_that_are_rewritten(
    backend: XGrammarBackend, tokenizer: Any, schema: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    """XGrammar alone would let the wrong ones through; nothing that the schema forbids is let through."""
    schema = {key: value for key, value in schema.items() if value is not None}
    for text in right:
        assert takes(backend, tokenizer, text, json=schema), text
        jsonschema.validate(json.loads(text), schema)
    for text in wrong:
        assert not takes(backend, tokenizer, text, json=schema), text


def test_open_objects_with_one_of_are_refused(tokenizer: Any) -> None:
    """Another property could always make a second alternative true."""
    backend = XGrammarBackend(XGrammarConfig(strict=False), context(tokenizer))
    with pytest.raises(ValueError, match="beside oneOf"):
        backend.compile(spec_of(json=ONE_OF))


def test_masks_agree_with_what_is_accepted(backend: XGrammarBackend, tokenizer: Any) -> None:
    """At every place of a text, for the whole vocabulary; and a refused token changes nothing."""
    matcher = backend.compile(spec_of(json=SCHEMA)).matcher()
    mask = np.zeros((1, bitmask_width(VOCAB)), dtype=np.int32)
    for token in [*tokenizer.encode('{"a": 12, "b": "x"}', add_special_tokens=False), END]:
        matcher.fill_bitmask(mask, 0)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little").astype(bool)
        for other in range(VOCAB):
            accepted = matcher.accept(other)
            assert accepted == bits[other], (other, tokenizer.decode([other]))
            if accepted:
                matcher.rollback(1)
        assert matcher.accept(token)
    assert matcher.is_terminated()
    assert not any(map(matcher.accept, (0, 5, END, -1, VOCAB + 3)))
    matcher.rollback(2)
    assert not matcher.is_terminated()
    assert not matcher.accept(END)


def test_special_tokens_are_no_text(
    backend: XGrammarBackend, tokenizer: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where their spelling fits; and nothing is written to standard error about them."""
    state = backend.compile(spec_of(regex="(<s>|a)+")).matcher()
    assert not state.accept(0)
    assert all(map(state.accept, tokenizer.encode("<", add_special_tokens=False)))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("vocab_size", [512, 500, 520])
def test_a_model_without_end_tokens(tokenizer: Any, vocab_size: int) -> None:
    """The output ends where nothing can follow; logits may be wider or narrower than the tokenizer."""
    backend = XGrammarBackend(XGrammarConfig(), context(tokenizer, vocab_size, ()))
    state = RequestGrammar(backend.compile(spec_of(choice=["no", "nobody"])), vocab_size=vocab_size)
    run = tokenizer.encode("nobody", add_special_tokens=False)
    for token in run[:-1]:
        state.advance([token])
        assert not state.is_terminated
    assert state.advance([run[-1], 5, 5]) == 1
    assert state.is_terminated


def test_forced_text_is_suggested(backend: XGrammarBackend, tokenizer: Any) -> None:
    state = RequestGrammar(
        backend.compile(spec_of(regex="the quick brown fox(es)?")), vocab_size=VOCAB, end_token_ids=[END]
    )
    found = state.forced([], 8)
    assert tokenizer.decode(found) == "the quick brown fox"[: len(tokenizer.decode(found))]
    assert len(found) >= 4
    assert state.forced([], 3) == found[:3]
    assert state.forced(found, 0) == []
    assert all(state.fitting(found, None))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"json": {"type": "objekt"}}, '^Unsupported type "objekt"'),
        ({"regex": "(a"}, "^Regex parsing error at position 3: The parenthesis is not closed"),
        ({"grammar": "root ::= a b"}, 'Rule "a" is not defined'),
    ],
)
def test_malformed(backend: XGrammarBackend, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        backend.compile(spec_of(**given))


def test_without_a_tokenizer() -> None:
    with pytest.raises(PluginUnsuitableError, match="this model has no tokenizer; set tokenizer to a directory"):
        XGrammarBackend(XGrammarConfig(), context(None))


def test_whitespace_has_an_end(tokenizer: Any) -> None:
    backend = XGrammarBackend(XGrammarConfig(max_whitespace=3), context(tokenizer))
    assert takes(backend, tokenizer, '{   "a": 1}', json=SCHEMA)
    assert not takes(backend, tokenizer, '{    "a": 1}', json=SCHEMA)


def test_open_objects(tokenizer: Any) -> None:
    backend = XGrammarBackend(XGrammarConfig(strict=False), context(tokenizer))
    assert takes(backend, tokenizer, '{"a": 1, "c": 2}', json=SCHEMA)


def test_memory_is_told(backend: XGrammarBackend) -> None:
    assert backend.compile(spec_of(json=json.dumps(SCHEMA))).num_bytes() > 1000
