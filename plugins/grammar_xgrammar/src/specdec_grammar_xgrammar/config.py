"""The backend's options."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import ge, instance_of


@frozen(kw_only=True)
class XGrammarConfig:
    """Keys of ``grammar_options``."""

    max_whitespace: int = field(default=40, validator=[instance_of(int), ge(1)])
    """Most whitespace characters between two parts of a JSON text; a small model may never stop otherwise."""
    strict: bool = field(default=True, validator=instance_of(bool))
    """Objects have only the properties that their schema names, unless it sets additionalProperties."""
    compile_threads: int = field(default=4, validator=[instance_of(int), ge(1)])
    """Threads that compile one grammar."""
