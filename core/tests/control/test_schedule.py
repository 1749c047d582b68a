"""Draft length by batch size."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.config import from_kwargs
from specdec.control import Schedule
from specdec.errors import ConfigError


def test_ranges_gaps_and_the_end() -> None:
    """A gap keeps the entry before it, the last entry goes on, and below the first all tokens are allowed."""
    schedule = Schedule.parse([[9, 16, 1], [2, 4, 3]], 5)
    assert [schedule.limit(n) for n in (1, 2, 4, 6, 9, 16, 100)] == [5, 3, 3, 3, 1, 1, 1]
    assert [Schedule.parse({8: 2, "32": 0}, 5).limit(n) for n in (7, 8, 31, 32)] == [5, 2, 2, 0]
    assert Schedule.parse(None, 5).limit(1000) == 5


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[1, 4, 3], [4, 8, 2]], r"without overlap \(batch size 4 has two entries\)"),
        ([[1, 4, 6]], r"with k from 0 to num_speculative_tokens = 5 \(batch size 1 has 6\)"),
        ([[4, 1, 2]], "a list of"),
        ([[0, 4, 2]], "a list of"),
        ([[1, 4]], "a list of"),
        ({"x": 2}, "a list of"),
        ({4: True}, "a list of"),
        ({4: -1}, "a list of"),
        ("4", "a list of"),
        ([], "a list of"),
    ],
)
def test_what_is_wrong_is_said_with_the_path(value: Any, message: str) -> None:
    speculative = {"method": "x", "num_speculative_tokens": 5, "num_speculative_tokens_per_batch_size": value}
    path = r"speculative\.num_speculative_tokens_per_batch_size = .*must be "
    with pytest.raises(ConfigError, match=f"(?s){path}.*{message}"):
        from_kwargs("m", speculative_config=speculative)


def test_speculation_is_auto_or_always() -> None:
    with pytest.raises(ConfigError, match=r"speculative\.speculation = 'allways'.* Did you mean 'always'\?"):
        from_kwargs("m", speculative_config={"method": "x", "speculation": "allways"})
