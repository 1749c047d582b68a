"""What is found in the metadata of installed distributions, good and bad (known bugs 95 and 97)."""

from __future__ import annotations

import logging
import sys

import pytest

from specdec.registry import PluginEntry, Registry

from .conftest import Toys, statuses


def _only_broken(registry: Registry) -> PluginEntry:
    (entry,) = (entry for entry in registry.entries() if entry.status == "broken")
    return entry


def test_entries_carry_kind_name_distribution_and_version_without_importing(toys: Toys) -> None:
    toys.proposer("toy-good", "good", version="1.2.3")
    (entry,) = Registry().entries()
    assert (entry.kind, entry.name, entry.distribution, entry.version) == ("proposer", "good", "toy-good", "1.2.3")
    assert entry.status == "ok"
    assert "toy_good" not in sys.modules


def test_hooks_are_read_from_the_source_without_importing(toys: Toys) -> None:
    toys.proposer(
        "toy-good",
        "good",
        "raise SystemExit\nfrom specdec import hookspecs\n@hookspecs.hookimpl\ndef propose(): ...\ndef other(): ...\n",
    )
    registry = Registry()
    assert registry.hooks(registry.entries()[0]) == ("propose",)
    assert "toy_good" not in sys.modules


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (
            "[specdec.proposers]\nbad = toy_bad.plugin\nbad = toy_bad.other\n",
            "has the key 'bad' twice in [specdec.proposers]",
        ),
        ("[specdec.proposers]\nbad toy_bad.plugin\n", "line 2, 'bad toy_bad.plugin', has no '='"),
        (b"[specdec.proposers]\nbad = toy_\xff\xfe.plugin\n", "is not UTF-8 text"),
        ("", "is empty"),
    ],
    ids=["duplicate key", "no equals sign", "bad bytes", "empty"],
)
def test_a_malformed_file_breaks_only_its_own_distribution(toys: Toys, content: str | bytes, told: str) -> None:
    toys.add("toy-bad", content, version="0.3")
    toys.proposer("toy-good", "good")
    registry = Registry()
    assert statuses(registry) == {"good": "ok", "toy-bad": "broken"}
    broken = _only_broken(registry)
    assert (broken.kind, broken.name, broken.distribution, broken.version) == (None, None, "toy-bad", "0.3")
    assert told in broken.detail


def test_files_of_other_projects_are_none_of_our_business(toys: Toys) -> None:
    toys.add("else-bad", b"[console_scripts]\nx = \xff\n")
    toys.add("else-twice", "[console_scripts]\na = b:c\na = b:d\n")
    toys.add("else-empty", "", requires=("numpy",))
    assert Registry().entries() == ()


def test_an_unknown_group_is_named_with_the_one_that_was_meant(toys: Toys) -> None:
    toys.add("toy-typo", {"specdec.proposer": {"typo": "toy_typo.plugin"}})
    assert _only_broken(Registry()).detail == (
        "no entry-point group is called 'specdec.proposer'; did you mean 'specdec.proposers'?"
    )


def test_a_head_without_a_method_is_told_how_heads_are_named(toys: Toys) -> None:
    toys.add(
        "toy-heads", {"specdec.heads": {"eagle_llama": "toy_heads", "eagle.": "toy_heads", "eagle.toy": "toy_heads"}}
    )
    registry = Registry()
    assert statuses(registry) == {"eagle_llama": "broken", "eagle.": "broken", "eagle.toy": "ok"}
    details = {entry.name: entry.detail for entry in registry.entries()}
    assert details["eagle_llama"] == "a head is named METHOD.MODEL_TYPE, such as 'eagle.llama', not 'eagle_llama'"


def test_a_value_that_is_no_module_breaks_one_plugin(toys: Toys) -> None:
    toys.add("toy-two", {"specdec.proposers": {"bad": "not a module!", "good": "toy_good.plugin"}})
    registry = Registry()
    assert statuses(registry) == {"bad": "broken", "good": "ok"}
    assert "'not a module!' is not 'module' or 'module:attribute'" in _only_broken(registry).detail


def test_a_requirement_that_does_not_parse_is_named(toys: Toys) -> None:
    toys.proposer("toy-bad", "bad", requires=("specdec-core >>> 1",))
    assert "'specdec-core >>> 1', which cannot be parsed" in _only_broken(Registry()).detail


def test_missing_metadata_leaves_the_name_of_the_folder(toys: Toys) -> None:
    toys.add("toy-bare", {"specdec.proposers": {"bare": "toy_bare.plugin"}}, metadata="")
    toys.proposer("toy-good", "good")
    entries = {entry.name: entry for entry in Registry().entries()}
    assert entries["bare"].distribution == "toy_bare"
    assert entries["good"].status == "ok"


def test_stale_metadata_before_the_installed_one_does_not_hide_its_plugins(
    toys: Toys, caplog: pytest.LogCaptureFixture
) -> None:
    """Known bug 95: an older folder of the same distribution comes first on the path."""
    toys.add("toy-twice", {"specdec.proposers": {"old": "toy_old.plugin"}}, version="1.0")
    toys.add("toy-twice", {"specdec.proposers": {"new": "toy_new.plugin"}}, version="1.10")
    with caplog.at_level(logging.WARNING):
        entries = Registry().entries()
    assert [(entry.name, entry.version, entry.status) for entry in entries] == [("new", "1.10", "ok")]
    assert "toy-twice has 2 metadata folders that differ" in caplog.text
    assert "Version 1.10 is used; remove what is stale." in caplog.text


def test_two_folders_that_agree_are_one_distribution(toys: Toys, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        toys.add("toy-same", {"specdec.proposers": {"same": "toy_same.plugin"}})
    with caplog.at_level(logging.WARNING):
        entries = Registry().entries()
    assert [(entry.name, entry.status) for entry in entries] == [("same", "ok")]
    assert not caplog.records


def test_folders_of_one_version_that_differ_are_joined(toys: Toys, caplog: pytest.LogCaptureFixture) -> None:
    toys.add("toy-twice", {"specdec.proposers": {"a": "toy_a.plugin"}})
    toys.add("toy_twice", {"specdec.proposers": {"b": "toy_b.plugin"}})
    with caplog.at_level(logging.WARNING):
        assert statuses(Registry()) == {"a": "ok", "b": "ok"}
    assert "metadata folders that differ" in caplog.text
