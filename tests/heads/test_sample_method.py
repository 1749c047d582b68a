"""How draft tokens are picked when nobody says so."""

from __future__ import annotations

import attrs
import pytest

from specdec.registry import Registry
from specdec.types import DEFAULT_DRAFT_SAMPLE_METHOD


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3", "medusa", "mlp_speculator"])
def test_all_methods_have_one_default(method: str) -> None:
    """What the verifier `match`, the default, keeps most of."""
    options = Registry().plugin_config("proposer", method, {"model": "a/model"})
    assert attrs.asdict(options)["draft_sample_method"] == DEFAULT_DRAFT_SAMPLE_METHOD == "coupled"
