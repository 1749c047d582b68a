"""Options are checked, and refused with what would be right."""

import pytest

from specdec.errors import ConfigError, PluginNotFoundError
from specdec.registry import Registry
from specdec.testing import engine_context
from specdec_eagle.config import EagleConfig
from specdec_eagle.eagle import check


def test_a_tree_in_vllms_notation():
    config = EagleConfig(model="x", speculative_token_tree="[(0,), (1,), (0, 0)]")
    assert config.static_tree == ((0,), (1,), (0, 0))
    assert EagleConfig(model="x", speculative_token_tree=[[0], [1], [0, 0]]) == config


@pytest.mark.parametrize(
    "tree",
    ["[(0, 0)]", "[(0,), (2,)]", "[(0,), (0,)]", "[()]", "nonsense", "[]", "[(-1,)]", "[(0.5,)]", "(0,)", 3],
)
def test_what_is_no_tree_is_refused(tree):
    """Known bug 67."""
    with pytest.raises(ConfigError, match=r"speculative\.speculative_token_tree.*must be a tree like"):
        EagleConfig(model="x", speculative_token_tree=tree)


def test_contradictions_are_refused():
    with pytest.raises(ConfigError, match="give one of them"):
        EagleConfig(model="x", speculative_token_tree="[(0,)]", tree_top_k=2)
    with pytest.raises(ConfigError, match=r"tree_top_k keep the likeliest .* give a static tree"):
        EagleConfig(model="x", tree_top_k=2, draft_sample_method="probabilistic")
    assert EagleConfig(model="x", tree_top_k=2).has_trees
    with pytest.raises(ConfigError, match=r"confidence_threshold is 0.5, but it is for chains"):
        EagleConfig(model="x", speculative_token_tree="[(0,)]", confidence_threshold=0.5)


def test_a_tree_larger_than_a_draft_is_refused():
    config = EagleConfig(model="x", speculative_token_tree="[(0,), (1,), (0, 0)]")
    with pytest.raises(ConfigError, match="3 nodes, more than speculative.num_speculative_tokens, 2: set that to 3"):
        check("eagle", config, engine_context(num_speculative_tokens=2, registry=Registry()))


def test_a_head_that_is_not_installed_is_named():
    """The registry says what to install, before anything is fetched."""
    context = engine_context(registry=Registry(), model_type="unheard_of")
    with pytest.raises(PluginNotFoundError, match=r"eagle3\.unheard_of"):
        check("eagle3", EagleConfig(model="nowhere/at_all"), context)
