"""Structured output: the interface of grammar backends, and a request's state in its grammar."""

from specdec.grammar.interface import CompiledGrammar, GrammarBackend, GrammarMatcher
from specdec.grammar.state import RequestGrammar, bitmask_of, bitmask_width
from specdec.sampling.structured import GrammarSpec, StructuredOutputsParams

__all__ = [
    "CompiledGrammar",
    "GrammarBackend",
    "GrammarMatcher",
    "GrammarSpec",
    "RequestGrammar",
    "StructuredOutputsParams",
    "bitmask_of",
    "bitmask_width",
]
