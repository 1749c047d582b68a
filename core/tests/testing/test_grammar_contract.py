"""The contract of grammar backends passes a small sound one, and catches every planted fault."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
import pytest

from specdec.grammar.interface import CompiledGrammar, GrammarBackend
from specdec.sampling.structured import GrammarSpec
from specdec.testing.contracts import GrammarBackendContract
from specdec.testing.contracts.grammar import EXAMPLES
from specdec.testing.grammars import ChoiceBackend, RuleGrammar, RuleMatcher

CONTRACT = GrammarBackendContract


class Sound(ChoiceBackend):
    """Knows choices, and of regular expressions the one of the contract as the choices that it stands for."""

    kinds: ClassVar[frozenset[str]] = frozenset({"choice", "regex"})
    matcher_class: ClassVar[type[RuleMatcher]] = RuleMatcher

    def __init__(self) -> None:
        super().__init__(CONTRACT.tokenizer(), CONTRACT.vocab_size, CONTRACT.end_token_ids)

    def compile(self, spec: GrammarSpec) -> Any:
        text = spec.text
        if spec.kind == "regex":
            try:
                pattern = re.compile(text)
            except re.error as error:
                raise ValueError(str(error)) from error
            words = [first + second + third for first in "ab" for second in "ab" for third in ("", "c")]
            text = json.dumps([word for word in words if pattern.fullmatch(word)])
        found = super().compile(GrammarSpec(kind="choice", text=text))
        return Compiled(found, self.matcher_class)


class Compiled(CompiledGrammar):
    def __init__(self, grammar: RuleGrammar, matcher_class: type[RuleMatcher]) -> None:
        allowed, *others = grammar._arguments
        self._arguments, self._class = (functools.cache(allowed), *others), matcher_class

    def matcher(self) -> RuleMatcher:
        return self._class(*self._arguments)


class TestSound(GrammarBackendContract):
    @pytest.fixture
    def backend(self) -> GrammarBackend:
        return Sound()


# --- faults of matchers -----------------------------------------------------------------------------


class AllowsAnyEnd(RuleMatcher):
    def accept(self, token_id: int) -> bool:
        if token_id in self._ends and not self.is_terminated():
            self._tokens.append(token_id)
            return True
        return super().accept(token_id)


class NeverEnds(RuleMatcher):
    def is_terminated(self) -> bool:
        return False


class MasksTooMuch(RuleMatcher):
    def fill_bitmask(self, bitmask: np.ndarray, row: int) -> None:
        super().fill_bitmask(bitmask, row)
        bitmask[row, 2] = 0


class MasksEveryRow(RuleMatcher):
    def fill_bitmask(self, bitmask: np.ndarray, row: int) -> None:
        super().fill_bitmask(bitmask, row)
        bitmask[:] = bitmask[row]


class AllowsSpecialTokens(RuleMatcher):
    def accept(self, token_id: int) -> bool:
        return token_id == 0 or super().accept(token_id)

    def fill_bitmask(self, bitmask: np.ndarray, row: int) -> None:
        super().fill_bitmask(bitmask, row)
        bitmask[row, 0] |= 1


class TakesWhatItRefuses(RuleMatcher):
    def accept(self, token_id: int) -> bool:
        good = super().accept(token_id)
        if not good:
            self._tokens.append(token_id)
        return good


class KeepsTheEnd(RuleMatcher):
    def rollback(self, num_tokens: int) -> None:
        super().rollback(num_tokens - (self._tokens[-1] in self._ends))


class GoesOnBehindTheEnd(RuleMatcher):
    def accept(self, token_id: int) -> bool:
        return super().accept(token_id) or self.is_terminated()


class SharesItsTokens(RuleMatcher):
    shared: ClassVar[list[int]] = []

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._tokens = self.shared


class SuggestsTooMuch(RuleMatcher):
    def suggest(self, limit: int) -> list[int]:
        return [5] * (limit + 1)


class SuggestsWrong(RuleMatcher):
    def suggest(self, limit: int) -> list[int]:
        return [0][:limit]


class SuggestsByMoving(RuleMatcher):
    def suggest(self, limit: int) -> list[int]:
        options: Iterable[int] = self._allowed(tuple(self._tokens))
        self.accept(next(iter(options)))
        return []


# --- faults of backends -----------------------------------------------------------------------------


class Nameless(Sound):
    name: ClassVar[str] = ""


class NoSuchKind(Sound):
    kinds: ClassVar[frozenset[str]] = frozenset({"regexp"})


class TakesMalformed(Sound):
    def compile(self, spec: GrammarSpec) -> Any:
        return super().compile(EXAMPLES["choice"].spec)


class SizeInWords(Sound):
    def compile(self, spec: GrammarSpec) -> Any:
        made = super().compile(spec)
        made.num_bytes = lambda: "12 KiB"
        return made


FAULTS: list[tuple[type, str]] = [
    (Nameless, "test_declares_what_it_is"),
    (NoSuchKind, "test_declares_what_it_is"),
    (NeverEnds, "test_whole_texts"),
    (AllowsAnyEnd, "test_other_texts"),
    (MasksTooMuch, "test_mask_is_what_accept_takes"),
    (MasksEveryRow, "test_mask_is_what_accept_takes"),
    (AllowsSpecialTokens, "test_mask_is_what_accept_takes"),
    (TakesWhatItRefuses, "test_refusal_changes_nothing"),
    (KeepsTheEnd, "test_rollback"),
    (GoesOnBehindTheEnd, "test_nothing_follows_the_end"),
    (SharesItsTokens, "test_requests_are_apart"),
    (SuggestsTooMuch, "test_suggestions"),
    (SuggestsWrong, "test_suggestions"),
    (SuggestsByMoving, "test_suggestions"),
    (TakesMalformed, "test_malformed"),
    (SizeInWords, "test_size"),
]


@pytest.mark.parametrize(("fault", "check"), FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_faults_are_caught(fault: type, check: str) -> None:
    backend = fault() if issubclass(fault, GrammarBackend) else type("Faulty", (Sound,), {"matcher_class": fault})()
    SharesItsTokens.shared.clear()
    kinds = {"test_declares_what_it_is": {}, "test_malformed": {"kind": "regex"}}
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(CONTRACT(), check)(backend, **kinds.get(check, {"kind": "choice"}))


def test_every_check_catches_something() -> None:
    checks = {name for name in vars(CONTRACT) if name.startswith("test_")}
    assert {check for _, check in FAULTS} == checks


@pytest.mark.parametrize("kind", EXAMPLES)
def test_examples_are_what_they_say(kind: str) -> None:
    """The texts of the examples, judged without a grammar backend where Python can."""
    example = EXAMPLES[kind]
    judges = {
        "choice": lambda text: text in json.loads(example.text),
        "regex": lambda text: re.fullmatch(example.text, text) is not None,
        "grammar": lambda text: re.fullmatch("b*a", text) is not None,
        "json": lambda text: re.fullmatch(r'\{"n": ?-?\d+\}', text) is not None,
        "json_object": lambda text: text.endswith("}") and isinstance(json.loads(text), dict),
    }
    assert all(judges[kind](text) for text in example.fits)
    assert not any(judges[kind](text) for text in example.wrong)
