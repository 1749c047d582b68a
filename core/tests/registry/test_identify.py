"""Which proposer a checkpoint belongs to (known bug 58: never by the folder's name)."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from specdec.errors import (
    ConfigError,
    ModelLoadError,
    ModelNotFoundError,
    PluginConflictError,
    PluginContractError,
    PluginNotFoundError,
    UnsupportedModelError,
)
from specdec.registry import Registry

from .conftest import PROPOSER, Toys

MARKERS = """
[[checkpoint]]
method = "wizard"
config = { architectures = "*Wizard*", "wizard_config.layers" = "*" }

[[checkpoint]]
method = "wizard"
config = { model_type = ["wiz", "wizard"] }
"""

IDENTIFY = (
    PROPOSER
    + """
from specdec.types import Identification


@hookimpl
def identify(checkpoint):
    if (checkpoint / "weights.bin").exists():
        return Identification(method="wizard", reason="it has weights.bin")
"""
)


def _checkpoint(folder: Path, config: dict[str, Any], name: str = "checkpoint") -> Path:
    path = folder / name
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path


def _wizard(toys: Toys, code: str = PROPOSER, markers: str = MARKERS, name: str = "wizard") -> None:
    toys.proposer(f"toy-{name}", name, code, files={f"toy_{name}/specdec_markers.toml": markers})


def test_markers_alone_decide_for_a_plugin_without_the_hook(toys: Toys, tmp_path: Path) -> None:
    _wizard(toys)
    found = Registry().identify(_checkpoint(tmp_path, {"model_type": "wiz"}))
    assert (found.method, found.reason) == ("wizard", "config.json has model_type = wiz")
    found = Registry().identify(
        _checkpoint(tmp_path, {"architectures": ["Other", "LlamaWizardHead"], "wizard_config": {"layers": 2}})
    )
    assert found.reason == "config.json has architectures = LlamaWizardHead, wizard_config.layers = 2"


def test_a_plugin_whose_markers_do_not_fit_is_not_imported(toys: Toys, tmp_path: Path) -> None:
    _wizard(toys)
    toys.proposer("toy-silent", "silent")
    with pytest.raises(PluginNotFoundError):
        Registry().identify(
            _checkpoint(tmp_path, {"architectures": ["LlamaWizardHead"], "wizard_config": {"layers": None}})
        )
    assert "toy_wizard" not in sys.modules
    assert "toy_silent" not in sys.modules


def test_the_hook_has_the_last_word(toys: Toys, tmp_path: Path) -> None:
    _wizard(toys, IDENTIFY)
    checkpoint = _checkpoint(tmp_path, {"model_type": "wizard"})
    with pytest.raises(PluginNotFoundError):
        Registry().identify(checkpoint)
    (checkpoint / "weights.bin").touch()
    assert Registry().identify(checkpoint).reason == "it has weights.bin"


@pytest.mark.parametrize("folder", ["eagle-x", "eagle3", "medusa", "ngram", "mtp", "dflash", "wizard"])
def test_the_folder_name_says_nothing(toys: Toys, tmp_path: Path, folder: str) -> None:
    _wizard(toys)
    toys.proposer(
        "toy-medusa",
        "medusa",
        files={
            "toy_medusa/specdec_markers.toml": '[[checkpoint]]\nmethod = "medusa"\nconfig = { model_type = "medusa" }\n'
        },
    )
    with pytest.raises(PluginNotFoundError) as caught:
        Registry().identify(_checkpoint(tmp_path, {"model_type": "llama"}, folder))
    assert caught.value.suggestion is None
    assert " (model_type: llama). Set speculative.method. Installed proposers: " in str(caught.value)


def test_nothing_fits_and_something_is_known(toys: Toys, tmp_path: Path) -> None:
    _wizard(toys)
    checkpoint = _checkpoint(tmp_path, {"model_type": "medusa"})
    with pytest.raises(PluginNotFoundError) as caught:
        Registry().identify(checkpoint)
    assert str(caught.value) == (
        f"No installed proposer recognises the checkpoint {checkpoint} (model_type: medusa). It looks like one for "
        "'medusa': pip install specdec-medusa. Otherwise set speculative.method. Installed proposers: wizard 1.0."
    )


def test_several_fit(toys: Toys, tmp_path: Path) -> None:
    _wizard(toys)
    _wizard(toys, markers='[[checkpoint]]\nmethod = "sage"\nconfig = { hidden_size = "6?" }\n', name="sage")
    checkpoint = _checkpoint(tmp_path, {"model_type": "wizard", "hidden_size": 64})
    with pytest.raises(PluginConflictError) as caught:
        Registry().identify(checkpoint)
    assert str(caught.value) == (
        f"2 proposers claim the checkpoint {checkpoint}: sage (config.json has hidden_size = 64); wizard "
        "(config.json has model_type = wizard). Set speculative.method to one of them."
    )


HEADED = '[[checkpoint]]\nmethod = "oracle"\nconfig = { num_oracle_layers = "[!0]*" }\nhead = true\n'


def test_a_marker_may_ask_for_the_head_of_the_targets_architecture(toys: Toys, tmp_path: Path) -> None:
    _wizard(toys, markers=HEADED, name="oracle")
    config = {"model_type": "outer", "text_config": {"model_type": "sphinx"}, "num_oracle_layers": 1}
    checkpoint = _checkpoint(tmp_path, config)
    with pytest.raises(PluginNotFoundError) as caught:
        Registry().identify(checkpoint)
    assert "num_oracle_layers = 1, which fits 'oracle', but no head 'oracle.sphinx' is installed." in str(caught.value)
    toys.add("toy-oracle-sphinx", {"specdec.heads": {"oracle.sphinx": "toy_oracle_sphinx.plugin"}})
    assert Registry().identify(checkpoint).method == "oracle"
    with pytest.raises(PluginNotFoundError):
        Registry().identify(_checkpoint(tmp_path, {**config, "num_oracle_layers": 0}))


def test_a_plugin_that_cannot_be_asked_is_named(toys: Toys, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _wizard(toys, "raise ImportError('no luck')")
    with caplog.at_level(logging.WARNING), pytest.raises(PluginNotFoundError, match="ImportError: no luck"):
        Registry().identify(_checkpoint(tmp_path, {"model_type": "wizard"}))
    assert "Proposer 'wizard' could not be asked" in caplog.text


def test_one_that_fits_but_may_not_be_used_is_named(toys: Toys, tmp_path: Path) -> None:
    markers = {"toy_wizard/specdec_markers.toml": MARKERS}
    toys.proposer("toy-wizard", "wizard", files=markers, requires=("specdec-core>=99",))
    with pytest.raises(PluginNotFoundError, match="fits 'wizard', but: .* requires specdec-core >=99, but 0"):
        Registry().identify(_checkpoint(tmp_path, {"model_type": "wizard"}))


@pytest.mark.parametrize(
    "markers", ["[[checkpoint]]\nmethod = 1 2", "x = 1", '[[checkpoint]]\nmethod = "wizard"\nconf = {}']
)
def test_malformed_markers_are_warned_about(
    toys: Toys, tmp_path: Path, caplog: pytest.LogCaptureFixture, markers: str
) -> None:
    _wizard(toys, markers=markers)
    with caplog.at_level(logging.WARNING), pytest.raises(PluginNotFoundError):
        Registry().identify(_checkpoint(tmp_path, {"model_type": "wizard"}))
    assert "specdec_markers.toml is malformed" in caplog.text


def test_a_folder_without_a_readable_config(toys: Toys, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"holds no config\.json"):
        Registry().identify(tmp_path)
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelLoadError, match=r"config\.json"):
            Registry().identify(tmp_path)


# --- what a checkpoint is not ----------------------------------------------------------------------


def test_a_checkpoint_that_another_proposer_claims_is_refused(toys: Toys, tmp_path: Path) -> None:
    _wizard(toys)
    toys.proposer("toy-other", "other", files={"toy_other/specdec_markers.toml": MARKERS.replace("wiz", "oth")})
    checkpoint = _checkpoint(tmp_path, {"model_type": "wiz"})
    Registry().check_method("wizard", checkpoint)
    with pytest.raises(
        ConfigError, match="not made for the method 'other' but for 'wizard' .config.json has model_type"
    ):
        Registry().check_method("other", checkpoint)
    Registry().check_method("other", _checkpoint(tmp_path, {"model_type": "unknown"}))
    Registry().check_method("other", tmp_path)  # no config.json: whoever loads it says so


def test_nobody_else_is_asked_where_the_method_claims_it(toys: Toys, tmp_path: Path) -> None:
    _wizard(toys)
    toys.proposer(
        "toy-other", "other", files={"toy_other/specdec_markers.toml": MARKERS.replace('"wizard"', '"other"')}
    )
    checkpoint = _checkpoint(tmp_path, {"architectures": ["TheWizard"], "wizard_config": {"layers": 1}})
    Registry().check_method("wizard", checkpoint)
    assert "toy_wizard" in sys.modules
    assert "toy_other" not in sys.modules


def test_a_proposer_without_markers_is_never_contradicted(toys: Toys, tmp_path: Path) -> None:
    _wizard(toys)
    toys.proposer("toy-silent", "silent")
    Registry().check_method("silent", _checkpoint(tmp_path, {"model_type": "wiz"}))


def test_what_a_proposer_drafts_with_is_no_target(toys: Toys, tmp_path: Path) -> None:
    _wizard(toys)
    checkpoint = _checkpoint(tmp_path, {"model_type": "wiz"})
    with pytest.raises(UnsupportedModelError, match="model: 'x' is no whole language model .* 'wizard' drafts with"):
        Registry().check_target("x", checkpoint)
    Registry().check_target("x", _checkpoint(tmp_path, {"model_type": "llama"}))


def test_whole_models_can_be_targets(toys: Toys, tmp_path: Path) -> None:
    """Nobody is imported for a marker that says so."""
    _wizard(toys, markers=MARKERS + "language_model = true")
    checkpoint = _checkpoint(tmp_path, {"model_type": "wiz"})
    Registry().check_target("x", checkpoint)
    assert "toy_wizard" not in sys.modules
    _wizard(toys, IDENTIFY.replace('weights.bin")', 'weights.bin", language_model=True)'), name="witch")


def test_a_plugin_can_say_that_a_checkpoint_is_both(toys: Toys, tmp_path: Path) -> None:
    _wizard(toys, IDENTIFY.replace('has weights.bin"', 'has weights.bin", language_model=True'))
    checkpoint = _checkpoint(tmp_path, {"model_type": "wiz"})
    (checkpoint / "weights.bin").touch()
    Registry().check_target("x", checkpoint)
    assert "toy_wizard" in sys.modules


# --- the hook check ---------------------------------------------------------------------------------


def test_a_proposer_checks_itself_before_the_target_is_loaded(toys: Toys) -> None:
    check = """
    @hookimpl
    def check(config, engine):
        from specdec.types import ProposerCapabilities

        return ProposerCapabilities(trees=True) if engine == "engine" else "no capabilities"
    """
    toys.proposer("toy-careful", "careful", PROPOSER + dedent(check))
    toys.proposer("toy-silent", "silent")
    found = Registry().check("careful", {}, "engine")  # type: ignore[arg-type]
    assert found is not None
    assert found.trees
    assert Registry().check("silent", {}, "engine") is None  # type: ignore[arg-type]
    with pytest.raises(PluginContractError, match="check returned 'no capabilities', where a specdec.types.Prop"):
        Registry().check("careful", {}, "other")  # type: ignore[arg-type]
