"""Grammars compiled and followed by XGrammar (Dong et al. 2024, arXiv 2411.15100)."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, ClassVar

import xgrammar

from specdec.errors import PluginUnsuitableError
from specdec.grammar import CompiledGrammar, GrammarBackend
from specdec_grammar_xgrammar.matcher import XGrammarMatcher
from specdec_grammar_xgrammar.rewriting import rewritten
from specdec_grammar_xgrammar.schema import check_schema

if TYPE_CHECKING:
    from collections.abc import Callable

    from specdec.grammar import GrammarSpec
    from specdec.types import EngineContext
    from specdec_grammar_xgrammar.config import XGrammarConfig

_PLACE = re.compile(r"^\[[\d:]+\] \S+?:\d+: ")
"""Time and source line before each of the library's messages."""


class XGrammarCompiled(CompiledGrammar):
    """A compiled grammar with the vocabulary it is for."""

    def __init__(self, compiled: Any, vocab_size: int, special_ids: frozenset[int], has_ends: bool) -> None:
        self._compiled = compiled
        self._vocab_size = vocab_size
        self._special_ids = special_ids
        self._has_ends = has_ends

    def matcher(self) -> XGrammarMatcher:
        """See `CompiledGrammar.matcher`."""
        return XGrammarMatcher(
            xgrammar.GrammarMatcher(self._compiled), self._vocab_size, self._special_ids, self._has_ends
        )

    def num_bytes(self) -> int:
        """See `CompiledGrammar.num_bytes`."""
        return int(self._compiled.memory_size_bytes)


class XGrammarBackend(GrammarBackend):
    """Compiles for the target's tokenizer. Special tokens are never part of a text, whatever their spelling."""

    name: ClassVar[str] = "xgrammar"
    kinds: ClassVar[frozenset[str]] = frozenset({"json", "json_object", "regex", "choice", "grammar", "structural_tag"})

    def __init__(self, config: XGrammarConfig, engine: EngineContext) -> None:
        """Read the vocabulary.

        Raises:
            PluginUnsuitableError: the model has no tokenizer, or one of an unknown type.
        """
        self._config = config
        self._vocab_size = engine.target_info.vocab_size
        ends = [token for token in engine.target_info.eos_token_ids if 0 <= token < self._vocab_size]
        info = _tokenizer_info(engine.tokenizer, self._vocab_size, ends)
        self._has_ends = bool(ends)
        self._special_ids = frozenset(info.special_token_ids)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=config.compile_threads, cache_enabled=False)

    def compile(self, spec: GrammarSpec) -> XGrammarCompiled:
        """See `GrammarBackend.compile`."""
        compile_kind: Callable[[GrammarSpec], Any] = {
            "json": self._json,
            "json_object": self._json_object,
            "regex": lambda spec: self._compiler.compile_regex(spec.text),
            "choice": lambda spec: self._compiler.compile_grammar(_choice_grammar(json.loads(spec.text))),
            "grammar": lambda spec: self._compiler.compile_grammar(spec.text),
            "structural_tag": lambda spec: self._compiler.compile_structural_tag(spec.text),
        }[spec.kind]
        try:
            compiled = compile_kind(spec)
        except RuntimeError as error:
            raise ValueError(_PLACE.sub("", str(error)).strip()) from error
        return XGrammarCompiled(compiled, self._vocab_size, self._special_ids, self._has_ends)

    def _json(self, spec: GrammarSpec) -> Any:
        strict = self._config.strict
        schema = rewritten(json.loads(spec.text), strict=strict)
        check_schema(schema, strict=strict)
        return self._schema(json.dumps(schema, ensure_ascii=False), spec.any_whitespace, strict=strict)

    def _json_object(self, spec: GrammarSpec) -> Any:
        return self._schema('{"type": "object"}', spec.any_whitespace, strict=False)

    def _schema(self, text: str, any_whitespace: bool, *, strict: bool) -> Any:
        return self._compiler.compile_json_schema(
            text,
            any_whitespace=any_whitespace,
            max_whitespace_cnt=self._config.max_whitespace if any_whitespace else None,
            strict_mode=strict,
        )


def _tokenizer_info(tokenizer: Any, vocab_size: int, ends: list[int]) -> Any:
    """The vocabulary as bytes, without its special tokens.

    A model without end tokens gets one behind its vocabulary, because XGrammar wants at least one.
    """
    if tokenizer is None:
        raise PluginUnsuitableError(
            "structured_outputs needs the text of tokens, and this model has no tokenizer; set tokenizer to a "
            "directory or model id that has one",
            kind="grammar",
            name="xgrammar",
        )
    try:
        found = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=ends or [0])
    except (ValueError, RuntimeError) as error:
        raise PluginUnsuitableError(
            f"XGrammar cannot read the model's tokenizer: {error}", kind="grammar", name="xgrammar"
        ) from error
    special = set(tokenizer.all_special_ids)
    special |= {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    texts = [""] * (vocab_size if ends else vocab_size + 1)
    for text, index in tokenizer.get_vocab().items():
        if index < vocab_size and (index not in special or index in ends):
            texts[index] = text
    return xgrammar.TokenizerInfo(
        texts,
        found.vocab_type,
        vocab_size=len(texts),
        stop_token_ids=ends or [vocab_size],
        add_prefix_space=found.add_prefix_space,
    )


def _choice_grammar(choices: list[str]) -> str:
    escapes = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"})
    return "root ::= " + " | ".join(f'"{choice.translate(escapes)}"' for choice in choices)
