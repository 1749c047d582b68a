"""How often listing plugins parses a distribution's metadata."""

from collections import Counter

import importlib_metadata
import pytest

from specdec.registry.discovery import discover


def test_metadata_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed = Counter[str]()
    before = importlib_metadata.Distribution.metadata.fget

    def counting(dist: importlib_metadata.Distribution) -> object:
        metadata = before(dist)
        parsed[metadata["Name"]] += 1
        return metadata

    monkeypatch.setattr(importlib_metadata.Distribution, "metadata", property(counting))
    assert discover().plugins
    assert set(parsed.values()) == {1}
