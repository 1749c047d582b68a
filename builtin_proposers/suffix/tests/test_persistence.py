"""Past responses outlive an engine; whatever is wrong with their file costs the file and nothing else."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from specdec.testing import engine_context
from specdec_suffix import persistence
from specdec_suffix.config import SuffixConfig
from specdec_suffix.suffix import SuffixProposer

from .kit import draft, respond, start


def open_proposer(path: Path, vocab_size: int = 64, interval: float = 0, **options: Any) -> SuffixProposer:
    config = SuffixConfig(suffix_cache_path=str(path), suffix_save_interval=interval, **options)
    proposer = SuffixProposer(config, engine_context(num_speculative_tokens=4, vocab_size=vocab_size))
    proposer.load(None)
    return proposer


def saved(path: Path) -> Path:
    proposer = open_proposer(path)
    respond(proposer, [9], [1, 2, 3, 4], suffix_scope="tenant-a")
    respond(proposer, [9], [1, 2, 5, 6])
    proposer.close()
    return path


def stored(proposer: SuffixProposer) -> list[tuple[str, list[int]]]:
    return [(scope, tokens.tolist()) for scope, tokens in proposer._store.responses()]


def test_responses_outlive_the_engine(tmp_path: Path) -> None:
    """Scopes and order too, and drafts come from them at once; the file is its owner's alone."""
    path = saved(tmp_path / "folder" / "responses")
    proposer = open_proposer(path)
    assert stored(proposer) == [("tenant-a", [9, 1, 2, 3, 4]), ("", [9, 1, 2, 5, 6])]
    start(proposer, "a", [8], suffix_scope="tenant-a")
    assert draft(proposer, [8, 1, 2]) == [3, 4]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["responses"]


def test_nothing_stored_is_a_file_too(tmp_path: Path) -> None:
    path = tmp_path / "responses"
    open_proposer(path).close()
    assert stored(open_proposer(path)) == []


def test_bounds_hold_for_what_is_read(tmp_path: Path) -> None:
    """A smaller bound than the one it was saved under keeps the newest."""
    path = saved(tmp_path / "responses")
    assert stored(open_proposer(path, suffix_decoding_max_cached_requests=1)) == [("", [9, 1, 2, 5, 6])]


def damage(path: Path, how: str) -> None:
    contents = path.read_bytes()
    damaged = {
        "empty": b"",
        "text": b"not a cache\n" * 30,
        "cut": contents[:-3],
        "cut header": contents[:20],
        "flipped": contents[:-4] + bytes([contents[-4] ^ 1]) + contents[-3:],
        "version": contents.replace(b'"version":"1"', b'"version":"9"'),
        "no digest": contents.replace(b'"digest"', b'"digset"'),
    }
    assert damaged[how] != contents
    path.write_bytes(damaged[how])


@pytest.mark.parametrize("how", ["empty", "text", "cut", "cut header", "flipped", "version", "no digest"])
def test_a_damaged_file(tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str) -> None:
    """A warning; the file is moved aside, a new one is written at the end."""
    path = saved(tmp_path / "responses")
    damage(path, how)
    with caplog.at_level(logging.WARNING):
        proposer = open_proposer(path)
    assert "is damaged" in caplog.text
    assert str(path) in caplog.text
    assert stored(proposer) == []
    assert sorted(os.listdir(tmp_path)) == ["responses.damaged"]
    respond(proposer, [9], [7])
    proposer.close()
    assert stored(open_proposer(path)) == [("", [9, 7])]


def test_a_file_of_another_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its token ids mean something else: it is neither used nor overwritten."""
    path = saved(tmp_path / "responses")
    before = path.read_bytes()
    with caplog.at_level(logging.WARNING):
        proposer = open_proposer(path, vocab_size=65)
    assert "another model or tokenizer" in caplog.text
    assert "vocabulary 64" in caplog.text
    assert "vocabulary 65" in caplog.text
    assert stored(proposer) == []
    respond(proposer, [9], [7])
    proposer.close()
    assert path.read_bytes() == before


def test_tokenizers_are_told_apart() -> None:
    class Tokenizer:
        def __init__(self, *words: str) -> None:
            self.words = words

        def get_vocab(self) -> dict[str, int]:
            return {word: i for i, word in enumerate(self.words)}

    one, other = (engine_context(tokenizer=Tokenizer(*words)) for words in ("ab", "ba"))
    assert persistence.fingerprint(one) != persistence.fingerprint(other)
    assert persistence.fingerprint(one) == persistence.fingerprint(engine_context(tokenizer=Tokenizer("a", "b")))


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A fault while saving is one warning; requests go on."""
    (tmp_path / "file").write_text("")
    proposer = open_proposer(tmp_path / "file" / "responses", interval=1e-9)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            respond(proposer, [9], [1, 2, 3, 4])
        proposer.close()
    assert caplog.text.count("cannot be written") == 1
    start(proposer, "a", [8])
    assert draft(proposer, [8, 1, 2]) == [3, 4]


def test_a_directory_in_its_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        proposer = open_proposer(tmp_path)
        respond(proposer, [9], [1])
        proposer.close()
    assert "the suffix cache" in caplog.text


def test_saved_while_running(tmp_path: Path) -> None:
    """With an interval, an engine that is killed has saved."""
    path = tmp_path / "responses"
    proposer = open_proposer(path, interval=1e-9)
    respond(proposer, [9], [1, 2])
    assert stored(open_proposer(path)) == [("", [9, 1, 2])]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new contents are put in place at once or not at all."""
    path = saved(tmp_path / "responses")
    before = path.read_bytes()
    proposer = open_proposer(path)
    respond(proposer, [9], [7])

    def fail(_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(persistence.os, "fsync", fail)
    proposer.close()
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["responses"]
