"""The options of the method."""

from typing import Any

import pytest

from specdec.errors import ConfigError
from specdec.registry import Registry
from specdec.testing import engine_context
from specdec_token_recycling.config import TokenRecyclingConfig
from specdec_token_recycling.plugin import check


def test_the_registry_finds_it() -> None:
    config = Registry().plugin_config("proposer", "token_recycling", {"speculative_token_tree": "[(0,), (1,)]"})
    assert config == TokenRecyclingConfig(speculative_token_tree=[[0], [1]])


def test_shapes() -> None:
    assert TokenRecyclingConfig().paths(3) == ((0,), (0, 0), (0, 0, 0))
    assert TokenRecyclingConfig(speculative_token_tree="[(0,), (1,)]").paths(9) == ((0,), (1,))


@pytest.mark.parametrize("tree", ["[]", "[(1,)]", "[(0, 0)]", "(0,)", [[0], [0]], 3])
def test_no_tree(tree: Any) -> None:
    with pytest.raises(ConfigError, match=r"speculative_token_tree"):
        Registry().plugin_config("proposer", "token_recycling", {"speculative_token_tree": tree})


def test_a_tree_larger_than_a_draft() -> None:
    config = TokenRecyclingConfig(speculative_token_tree="[(0,), (1,), (2,)]")
    assert check(config, engine_context(num_speculative_tokens=3)).trees
    with pytest.raises(
        ConfigError, match="has 3 nodes, more than speculative.num_speculative_tokens, 2: set that to 3"
    ):
        check(config, engine_context(num_speculative_tokens=2))
