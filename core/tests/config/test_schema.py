"""The configuration classes: one default a field, a docstring a field, strict values."""

import re
import subprocess
import sys

import attrs
import pytest

from specdec.config import EngineConfig, PluginsConfig, SpeculativeConfig, from_kwargs
from specdec.config.introspect import field_docs, leaves
from specdec.config.problems import InvalidValueError, SettingsConflictError
from specdec.config.vllm_keys import ENGINE_ADVICE
from specdec.errors import ConfigError, SpecdecError


@pytest.mark.parametrize("cls", [EngineConfig, SpeculativeConfig, PluginsConfig])
def test_every_field_has_a_docstring(cls):
    docs = field_docs(cls)
    assert [a.name for a in attrs.fields(cls) if not docs.get(a.name)] == []


def test_a_missing_docstring_is_noticed():
    @attrs.frozen
    class Undocumented:
        good: int = 1
        """Here."""
        bad: int = 2
        also: int = 3
        """Here too."""

    assert field_docs(Undocumented) == {"good": "Here.", "bad": "", "also": "Here too."}


def test_docstrings_of_inherited_fields_are_found():
    @attrs.frozen
    class Base:
        shared: int = 1
        """From the base."""
        changed: int = 2
        """Said here."""

    @attrs.frozen
    class Derived(Base):
        changed: int = 3
        """Said again."""
        own: int = 4
        """Own."""

    assert field_docs(Derived) == {"shared": "From the base.", "changed": "Said again.", "own": "Own."}


def test_every_field_has_a_validator():
    for cls in (EngineConfig, SpeculativeConfig, PluginsConfig):
        assert [a.name for a in attrs.fields(cls) if a.validator is None] == []


def test_configurations_are_frozen():
    config = EngineConfig(model="m")
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        config.block_size = 32


def test_a_callers_dict_is_not_shared():
    options = {"prompt_lookup_max": 4}
    config = SpeculativeConfig(method="ngram", options=options)
    options["prompt_lookup_max"] = 9
    assert config.options == {"prompt_lookup_max": 4}


@pytest.mark.parametrize("k", [0, 65, 1000, -1])
def test_k_out_of_range_names_option_value_and_range(k):
    with pytest.raises(ConfigError) as caught:
        from_kwargs("m", speculative_config={"method": "ngram", "num_speculative_tokens": k})
    assert str(caught.value) == f"speculative.num_speculative_tokens = {k}: must be an integer from 1 to 64."
    assert caught.value.path == "speculative.num_speculative_tokens"


@pytest.mark.parametrize("k", [1, 64])
def test_k_at_the_ends_of_its_range(k):
    assert SpeculativeConfig(method="ngram", num_speculative_tokens=k).num_speculative_tokens == k


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_size", True),
        ("block_size", "16"),
        ("block_size", 16.0),
        ("block_size", None),
        ("seed", -1),
        ("seed", 2**64),
        ("max_model_len", 1),
        ("fuse", 1),
        ("fuse", "true"),
        ("dtype", "half"),
        ("device", ""),
        ("device", "GPU 0"),
        ("model", ""),
        ("model", 3),
        ("num_threads", 0),
        ("log_stats_interval", 0),
        ("log_stats_interval", float("nan")),
        ("proposer_time_budget", -0.5),
        ("proposer_time_budget", float("inf")),
        ("stat_loggers", "logging"),
        ("stat_loggers", ["logging", 3]),
        ("stat_loggers", [""]),
        ("kv_cache_memory", 0),
        ("kv_cache_memory", True),
        ("kv_cache_memory", "1 GX"),
        ("scheduling_policy", "lifo"),
        ("verifier_options", []),
        ("plugins", 3),
    ],
)
def test_refusals_name_path_and_value_in_both_ways_of_building(name, value):
    for build in (from_kwargs, EngineConfig):
        with pytest.raises(ConfigError) as caught:
            build(**{"model": "m", name: value})
        assert caught.value.path.split("[")[0] == name
        assert str(caught.value).startswith(name)
        assert "must be" in str(caught.value)


def test_true_is_not_an_integer_and_quoted_numbers_are_explained():
    with pytest.raises(InvalidValueError, match="block_size = true: .* true is a boolean"):
        from_kwargs("m", block_size=True)
    with pytest.raises(InvalidValueError, match="write 16 without quotes"):
        from_kwargs("m", block_size="16")


def test_closest_name_is_given():
    with pytest.raises(ConfigError, match=r"unknown setting 'blok_size'. Did you mean 'block_size'?"):
        from_kwargs("m", blok_size=16)
    with pytest.raises(ConfigError, match=r"Did you mean 'bfloat16'?"):
        from_kwargs("m", dtype="bf16")
    with pytest.raises(ConfigError, match=r"unknown setting 'plugins.blok'. Did you mean 'block'?"):
        from_kwargs("m", plugins={"blok": []})


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("gpu_memory_utilization", "kv_cache_memory"),
        ("gpu-memory-utilization", "kv_cache_memory"),
        ("enable_lora", "Adapters are not supported"),
        ("num_speculative_tokens", "speculative_config"),
    ],
)
def test_what_vllms_engine_takes_besides_is_explained(key, advice):
    with pytest.raises(ConfigError, match=rf"unknown setting '{key}'\. .*{advice}"):
        from_kwargs("m", **{key: 1})


def test_advice_for_arguments_of_vllm_names_what_exists():
    """No argument has advice and exists as well; settings that the advice names exist."""
    own = {field.name for field in attrs.fields(EngineConfig)}
    assert not set(ENGINE_ADVICE) & own
    named = {word for text in ENGINE_ADVICE.values() for word in re.findall(r"[a-z]+(?:_[a-z]+)+", text)}
    assert named - {"speculative_config"} <= own  # that one is the table's name in Python


def test_several_mistakes_are_told_together():
    with pytest.raises(ConfigError) as caught:
        from_kwargs("m", dtype=3, zzz=1)
    assert "2 settings are wrong" in str(caught.value)
    assert "dtype = 3" in str(caught.value)
    assert "'zzz'" in str(caught.value)


@pytest.mark.parametrize("given", [{}, {"num_speculative_tokens": 3}, {"prompt_lookup_max": 3}])
def test_speculation_without_method_or_model_is_refused(given):
    """Known bug 91: settings that do nothing without another one."""
    with pytest.raises(SettingsConflictError, match=r"without 'method' or 'model'"):
        from_kwargs("m", speculative_config=given)


def test_a_misspelt_method_is_recognised():
    with pytest.raises(ConfigError, match=r"unknown setting 'speculative.methd'. Did you mean 'method'\?"):
        from_kwargs("m", speculative_config={"methd": "ngram", "num_speculative_tokens": 3})


def test_a_draft_model_without_method_is_left_to_detection():
    config = from_kwargs("m", speculative_config={"model": "some/head"})
    assert config.speculative == SpeculativeConfig(model="some/head")


def test_the_old_bracket_spelling_says_what_to_write():
    with pytest.raises(ConfigError, match='Write "method": "ngram" and leave "model" out'):
        from_kwargs("m", speculative_config={"model": "[ngram]", "num_speculative_tokens": 5})


def test_unknown_speculative_keys_are_the_methods():
    config = from_kwargs("m", speculative_config={"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4})
    assert config.speculative.options == {"prompt_lookup_min": 2, "prompt_lookup_max": 4}


def test_options_in_a_table_of_their_own_are_refused():
    with pytest.raises(ConfigError, match="beside 'method'"):
        from_kwargs("m", speculative_config={"method": "ngram", "options": {"prompt_lookup_max": 4}})


def test_a_negative_or_mistyped_speculative_config():
    with pytest.raises(ConfigError, match=r"^speculative = 'ngram': must be a table"):
        from_kwargs("m", speculative_config="ngram")
    with pytest.raises(ConfigError, match="same setting"):
        from_kwargs("m", speculative_config=None, speculative=None)


def test_python_values_are_taken_like_their_names(tmp_path):
    import torch

    config = from_kwargs(tmp_path, dtype=torch.bfloat16, device=torch.device("cpu"), stat_loggers=())
    assert (config.model, config.dtype, config.device, config.stat_loggers) == (str(tmp_path), "bfloat16", "cpu", ())


def test_ready_made_sections_are_taken():
    plugins, speculative = PluginsConfig(block=("a",)), SpeculativeConfig(method="ngram")
    config = from_kwargs("m", plugins=plugins, speculative_config=speculative)
    assert config.plugins == plugins
    assert config.speculative == speculative


def test_configuration_errors_are_specdec_errors():
    assert issubclass(ConfigError, SpecdecError)


def test_leaves_cover_nested_settings():
    paths = [leaf.path for leaf in leaves(EngineConfig)]
    assert "plugins.block" in paths
    assert "speculative.num_speculative_tokens" in paths
    assert "speculative.options" not in paths
    assert all(leaf.doc for leaf in leaves(EngineConfig))


def test_importing_the_configuration_imports_no_torch():
    code = "import sys, specdec.config, specdec.cli.main; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
