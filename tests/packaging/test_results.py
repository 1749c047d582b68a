"""Results of benchmarks say what was measured, not where on some machine it lay."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_no_absolute_path(path: Path) -> None:
    found = [text for text in _strings(json.loads(path.read_text(encoding="utf-8"))) if text.startswith("/")]
    assert found == []


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _strings(inner)
