"""Importing what was selected, and the many ways in which that goes wrong (known bugs 92, 94, 98 and 100)."""

from __future__ import annotations

import logging
import sys
from textwrap import dedent

import attrs
import pytest

from specdec.config.schema import SpeculativeConfig
from specdec.errors import ConfigError, PluginContractError, PluginImportError, PluginUnsuitableError
from specdec.registry import Registry
from specdec.wording import shown

from .conftest import PROPOSER, Toys


def _create(name: str) -> object:
    return Registry().create("proposer", name, "propose", config={"a": 1}, engine=None)


def _hooks(body: str) -> str:
    return "from specdec.hookspecs import hookimpl\n" + dedent(body)


def test_only_what_is_selected_is_imported(toys: Toys) -> None:
    toys.proposer("toy-one", "one")
    toys.proposer("toy-two", "two")
    proposer = _create("one")
    assert type(proposer).__name__ == "Toy"
    assert proposer.config == {"a": 1}  # type: ignore[attr-defined]
    assert "toy_one.plugin" in sys.modules
    assert "toy_two" not in sys.modules


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("raise ImportError('no luck')", "ImportError: no luck"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("class Odd(BaseException): pass\nraise Odd('out')", "Odd: out"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def broken(:", "SyntaxError: invalid syntax"),
    ],
)
def test_a_plugin_that_fails_on_import_harms_nobody_else(toys: Toys, code: str, told: str) -> None:
    """Known bugs 92 and 94: listing and other plugins work; asking for it gives the original cause."""
    toys.proposer("toy-bad", "bad", code, version="0.7")
    toys.proposer("toy-good", "good")
    assert {entry.name for entry in Registry().entries()} == {"bad", "good"}
    assert _create("good")
    with pytest.raises(PluginImportError) as caught:
        _create("bad")
    assert str(caught.value).startswith(
        f"The proposer 'bad' of toy-bad 0.7 is installed but cannot be imported: {told}"
    )
    assert type(caught.value.__cause__).__name__ == told.partition(":")[0]


def test_an_interrupt_during_import_stays_an_interrupt(toys: Toys) -> None:
    toys.proposer("toy-slow", "slow", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        _create("slow")


def test_a_missing_required_distribution_is_named(toys: Toys, caplog: pytest.LogCaptureFixture) -> None:
    toys.proposer("toy-bad", "bad", "import no_such_thing.deep", requires=("No.Such-Thing>=2",))
    with caplog.at_level(logging.WARNING), pytest.raises(PluginImportError) as caught:
        _create("bad")
    assert str(caught.value) == (
        "The proposer 'bad' of toy-bad 1.0 is installed but cannot be imported: module 'no_such_thing' is missing. "
        "toy-bad requires No.Such-Thing>=2: pip install 'No.Such-Thing>=2'"
    )
    assert caught.value.missing_module == "no_such_thing"
    assert "may not work: No.Such-Thing is not installed" in caplog.text


def test_a_missing_module_whose_distribution_has_another_name(toys: Toys) -> None:
    toys.proposer("toy-bad", "bad", "import no_such_thing", requires=("numpy", "python-nosuch"))
    with pytest.raises(PluginImportError, match="toy-bad requires python-nosuch: pip install 'python-nosuch'"):
        _create("bad")


def test_the_extra_that_brings_a_missing_module_is_named(toys: Toys) -> None:
    requires = ('numpy; extra == "small"', 'no-such-thing>=1; extra == "fast" and python_version >= "3"')
    toys.proposer("toy-bad", "bad", "import no_such_thing", requires=requires)
    with pytest.raises(PluginImportError) as caught:
        _create("bad")
    assert str(caught.value).endswith(
        "module 'no_such_thing' is missing. The extra 'fast' brings it: pip install 'toy-bad[fast]'"
    )
    assert caught.value.install == "toy-bad[fast]"


def test_a_dependency_in_the_wrong_version_is_named(toys: Toys) -> None:
    """Known bug 98: the plugin, the requirement and the version found."""
    toys.proposer("toy-bad", "bad", "from numpy import gone_since_2", requires=("numpy<1",))
    with pytest.raises(
        PluginImportError, match=r"cannot import name .* toy-bad: requires numpy <1; \d.* is installed\."
    ):
        _create("bad")


def test_a_missing_module_that_nothing_explains(toys: Toys) -> None:
    toys.proposer("toy-bad", "bad", "import no_such_thing")
    with pytest.raises(PluginImportError, match="toy-bad does not say which distribution brings it"):
        _create("bad")


def test_an_import_that_fails_inside_the_hook_is_told_like_one_at_import(toys: Toys) -> None:
    code = _hooks("@hookimpl\ndef propose():\n    import no_such_thing")
    toys.proposer("toy-bad", "bad", code, requires=('no-such-thing; extra == "fast"',))
    with pytest.raises(PluginImportError, match=r"pip install 'toy-bad\[fast\]'"):
        _create("bad")


def test_an_entry_point_to_a_module_that_is_gone(toys: Toys) -> None:
    toys.add("toy-gone", {"specdec.proposers": {"gone": "toy_gone.plugin"}})
    with pytest.raises(PluginImportError) as caught:
        _create("gone")
    assert str(caught.value) == (
        "The proposer 'gone' of toy-gone 1.0 is installed but cannot be imported: module 'toy_gone' is missing. Its "
        "entry point names 'toy_gone.plugin': correct gone in "
        '[project.entry-points."specdec.proposers"] of its pyproject.toml and install it again, or reinstall toy-gone '
        "if the file was lost."
    )


def test_a_module_of_the_plugin_that_is_gone(toys: Toys) -> None:
    toys.proposer("toy-gone", "gone", "import toy_gone.tables")
    with pytest.raises(
        PluginImportError, match="incomplete or stale: pip install --force-reinstall --no-deps toy-gone"
    ):
        _create("gone")


def test_an_entry_point_to_an_attribute_that_is_gone(toys: Toys) -> None:
    toys.add("toy-gone", {"specdec.proposers": {"gone": "toy_gone:plugin"}}, files={"toy_gone/__init__.py": "x = 1"})
    with pytest.raises(PluginContractError, match="names 'toy_gone:plugin', but there is no 'plugin' in it"):
        _create("gone")


# --- what a plugin registers --------------------------------------------------------------------


def test_an_instance_may_stand_in_for_a_module(toys: Toys) -> None:
    code = PROPOSER + dedent(
        """
        class Hooks:
            @hookimpl
            def propose(self, config):
                return Toy(config)

        hooks = Hooks()
        """
    )
    toys.add("toy-one", {"specdec.proposers": {"one": "toy_one:hooks"}}, files={"toy_one/__init__.py": code})
    assert type(_create("one")).__name__ == "Toy"


def test_a_function_in_place_of_a_module_is_refused(toys: Toys) -> None:
    code = _hooks("@hookimpl\ndef propose(): ...")
    toys.add("toy-bad", {"specdec.proposers": {"bad": "toy_bad:propose"}}, files={"toy_bad/__init__.py": code})
    with pytest.raises(
        PluginContractError, match="its entry point 'toy_bad:propose' is a function; it must name a mod"
    ):
        _create("bad")


def test_a_class_in_place_of_a_module_is_refused(toys: Toys) -> None:
    code = _hooks("class Hooks:\n    @hookimpl\n    def propose(self): ...")
    toys.add("toy-bad", {"specdec.proposers": {"bad": "toy_bad:Hooks"}}, files={"toy_bad/__init__.py": code})
    with pytest.raises(PluginContractError) as caught:
        _create("bad")
    assert str(caught.value) == (
        "The proposer 'bad' of toy-bad 1.0 breaks the contract of plugins: its entry point 'toy_bad:Hooks' is a class; "
        "it must name a module (or an instance) that holds functions marked with @hookimpl."
    )


def test_a_misspelt_hook_is_named_with_the_right_one(toys: Toys) -> None:
    toys.proposer("toy-bad", "bad", PROPOSER + "\n@hookimpl\ndef config_clas(): ...\n")
    with pytest.raises(
        PluginContractError, match="it implements 'config_clas', which is no hook. Did you mean 'config_class'?"
    ):
        _create("bad")


def test_an_argument_that_the_hook_does_not_have_is_named(toys: Toys) -> None:
    """Known bug 100: a plugin written for an older signature."""
    toys.proposer("toy-bad", "bad", _hooks("@hookimpl\ndef propose(vllm_config): ..."))
    with pytest.raises(PluginContractError, match="does not fit the hook specification.*propose.*'vllm_config'"):
        _create("bad")


def test_a_plugin_without_the_hook_of_its_kind(toys: Toys) -> None:
    toys.proposer("toy-bad", "bad", _hooks("@hookimpl\ndef config_class(): ...\ndef propose(): ..."))
    with pytest.raises(PluginContractError) as caught:
        _create("bad")
    assert str(caught.value).endswith(
        "a proposer must implement the hook 'propose'; it implements config_class. It has a function 'propose': "
        "mark it with @specdec.hookspecs.hookimpl."
    )


# --- what hooks return and raise ----------------------------------------------------------------


def test_a_hook_that_returns_nothing(toys: Toys) -> None:
    toys.proposer("toy-bad", "bad", _hooks("@hookimpl\ndef propose(): ..."))
    with pytest.raises(PluginContractError, match="its hook 'propose' returned None, where an object is required"):
        _create("bad")


def test_a_hook_that_returns_the_wrong_thing(toys: Toys) -> None:
    toys.proposer("toy-bad", "bad", _hooks("@hookimpl\ndef propose(): return 'me'"))
    with pytest.raises(PluginContractError, match="returned str, where a specdec.drafting.base.Proposer is required"):
        _create("bad")


def test_a_hook_that_returns_a_class(toys: Toys) -> None:
    toys.proposer("toy-bad", "bad", _hooks("class Mine: ...\n\n@hookimpl\ndef propose(): return Mine"))
    with pytest.raises(PluginContractError, match=r"returned the class Mine itself \(not Mine\(…\), an object of it\)"):
        _create("bad")


@pytest.mark.parametrize("raised", ["ValueError('odd')", "SystemExit('odd')"])
def test_a_hook_that_raises_names_the_plugin(toys: Toys, raised: str) -> None:
    toys.proposer("toy-bad", "bad", _hooks(f"@hookimpl\ndef propose(): raise {raised}"))
    with pytest.raises(
        PluginContractError,
        match=r"'bad' of toy-bad 1.0 .* its hook 'propose' raised .*: odd \(toy_bad.plugin, line 3\)",
    ) as caught:
        _create("bad")
    assert caught.value.__cause__ is not None


def test_errors_meant_for_the_user_pass_as_they_are(toys: Toys) -> None:
    code = _hooks(
        """
        from specdec.errors import PluginUnsuitableError

        @hookimpl
        def propose():
            raise PluginUnsuitableError("not for this model", reasons=["too wide", "too deep"])
        """
    )
    toys.proposer("toy-picky", "picky", code)
    with pytest.raises(PluginUnsuitableError, match="not for this model") as caught:
        _create("picky")
    assert caught.value.reasons == ("too wide", "too deep")


def test_an_option_that_would_never_arrive_is_refused(toys: Toys) -> None:
    code = _hooks(
        """
        from attrs import frozen

        @frozen(kw_only=True)
        class Options:
            model: str | None = None
            {name}: int = 3

        @hookimpl
        def config_class():
            return Options

        @hookimpl
        def propose(config): ...
        """
    )
    toys.proposer("toy-good", "good", code.replace("{name}", "depth"))
    toys.proposer("toy-bad", "bad", code.replace("{name}", "num_speculative_tokens"))
    assert Registry().plugin_config("proposer", "good", {"depth": 4}).depth == 4
    with pytest.raises(
        PluginContractError, match="its option 'num_speculative_tokens' is a key of the core's own and nev"
    ):
        Registry().plugin_config("proposer", "bad", {})


def test_each_plugin_has_a_manager_of_its_own(toys: Toys) -> None:
    """Two proposers of one engine: asking for one never reaches the other."""
    toys.proposer("toy-one", "one")
    toys.proposer("toy-none", "none", _hooks("@hookimpl\ndef propose(): ..."))
    registry = Registry()
    assert registry.create("proposer", "one", "propose", config={}, engine=None)
    with pytest.raises(PluginContractError, match="'none' .* returned None"):
        registry.create("proposer", "none", "propose", config={}, engine=None)
    assert registry.load("proposer", "one").manager is not registry.load("proposer", "none").manager
    assert registry.load("proposer", "one").manager is registry.load("proposer", "one").manager
    assert Registry().load("proposer", "one").manager is not registry.load("proposer", "one").manager


# --- options ------------------------------------------------------------------------------------

CONFIG = (
    PROPOSER
    + """
from attrs import field, frozen
from attrs.validators import ge, instance_of


@frozen(kw_only=True)
class ToyConfig:
    prompt_lookup_max: int = field(default=4, validator=[instance_of(int), ge(1)])


@hookimpl
def config_class():
    return ToyConfig
"""
)


def test_options_become_an_instance_of_the_plugins_own_class(toys: Toys) -> None:
    toys.proposer("toy-one", "one", CONFIG)
    config = Registry().plugin_config("proposer", "one", {"prompt_lookup_max": 7})
    assert (type(config).__name__, config.prompt_lookup_max) == ("ToyConfig", 7)
    assert Registry().plugin_config("proposer", "one", {}).prompt_lookup_max == 4


def test_an_unknown_option_is_refused_with_path_and_nearest_key(toys: Toys) -> None:
    toys.proposer("toy-one", "one", CONFIG)
    with pytest.raises(ConfigError) as caught:
        Registry().plugin_config("proposer", "one", {"prompt_lookup_maxx": 7})
    assert str(caught.value) == ("unknown setting 'speculative.prompt_lookup_maxx'. Did you mean 'prompt_lookup_max'?")
    assert caught.value.path == "speculative.prompt_lookup_maxx"


def test_an_unknown_option_like_nothing_else_lists_all_keys_of_the_section(toys: Toys) -> None:
    toys.proposer("toy-one", "one", CONFIG)
    with pytest.raises(ConfigError) as caught:
        Registry().plugin_config("proposer", "one", {"xyz": 7})
    known = str(caught.value).removesuffix(".").partition("Known here: ")[2].split(", ")
    assert known[0] == "prompt_lookup_max"
    assert known[1:] == [field.name for field in attrs.fields(SpeculativeConfig) if field.name != "options"]


def test_a_misspelt_key_of_the_core_is_recognised(toys: Toys) -> None:
    toys.proposer("toy-one", "one", CONFIG)
    with pytest.raises(ConfigError, match="Did you mean 'num_speculative_tokens'"):
        Registry().plugin_config("proposer", "one", {"num_speculative_token": 7})


@pytest.mark.parametrize(("value", "told"), [(0, ">= 1"), ("7", "an integer"), (True, "an integer")])
def test_a_bad_value_is_refused_with_path_and_value(toys: Toys, value: object, told: str) -> None:
    toys.proposer("toy-one", "one", CONFIG)
    with pytest.raises(ConfigError) as caught:
        Registry().plugin_config("proposer", "one", {"prompt_lookup_max": value})
    assert str(caught.value).startswith(f"speculative.prompt_lookup_max = {shown(value)}: must be")
    assert told in str(caught.value)


def test_a_plugin_without_options(toys: Toys) -> None:
    toys.proposer("toy-one", "one")
    assert Registry().plugin_config("proposer", "one", {}) == {}
    with pytest.raises(ConfigError, match=r"unknown setting 'speculative\.depth'"):
        Registry().plugin_config("proposer", "one", {"depth": 3})


def test_a_core_key_that_the_method_has_no_use_for(toys: Toys) -> None:
    toys.proposer("toy-one", "one", CONFIG)
    with pytest.raises(ConfigError) as caught:
        Registry().plugin_config("proposer", "one", {"model": "/somewhere"})
    assert str(caught.value) == (
        "speculative.model is set, but the proposer 'one' of toy-one 1.0 has no use for it: leave it out."
    )


def test_a_config_class_that_is_no_attrs_class(toys: Toys) -> None:
    toys.proposer("toy-one", "one", PROPOSER + "\n@hookimpl\ndef config_class():\n    return dict\n")
    with pytest.raises(PluginContractError, match="config_class returned <class 'dict'>, which is not an attrs class"):
        Registry().plugin_config("proposer", "one", {})


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("rejection_sample_method", "decided by a verifier, named outside this table"),
        ("disable_by_batch_size", "Use num_speculative_tokens_per_batch_size"),
        ("draft_tensor_parallel_size", "leave it out"),
    ],
)
def test_vllms_keys_that_are_something_else_here_are_explained(toys: Toys, key: str, advice: str) -> None:
    toys.proposer("toy-one", "one", CONFIG)
    with pytest.raises(ConfigError, match=rf"unknown setting 'speculative\.{key}'\. .*{advice}"):
        Registry().plugin_config("proposer", "one", {key: 1})


def test_vllms_keys_that_a_method_has_are_its_own() -> None:
    from specdec.config.vllm_keys import ADVICE
    from specdec.registry.options import option_names

    taken = {key for _, keys in option_names("proposer") for key in keys}
    own = {field.name for field in attrs.fields(SpeculativeConfig)}
    assert not set(ADVICE) & (taken | own)
