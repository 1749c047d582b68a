"""Files, environment and command line, and where each value came from."""

import json
import tomllib

import pytest
from attrs import field, frozen
from hypothesis import given
from hypothesis import strategies as st

from specdec.config import EngineConfig, describe, from_kwargs, load, load_table, to_dict, to_toml
from specdec.config import validators as check
from specdec.config.files import find
from specdec.errors import ConfigError

TOML = """\
# an engine
model = "demo:smollm2"
block_size = 32

[speculative]
method = "ngram"
prompt_lookup_max = 4

[plugins]
block = ["suffix"]
"""
YAML = """\
# an engine
model: demo:smollm2
block_size: 32

speculative:
  method: ngram
  prompt_lookup_max: 4

plugins:
  block: [suffix]
"""
JSON = """\
{

"model": "demo:smollm2",
"block_size": 32,
"speculative":
  {"method": "ngram", "prompt_lookup_max": 4},
"plugins": {"block": ["suffix"]}
}
"""


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("name", "text"), [("a.toml", TOML), ("a.yaml", YAML), ("a.yml", YAML), ("a.json", JSON)])
def test_the_three_formats_say_the_same(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    config, sources = load(name, environ={})
    assert config == from_kwargs(
        "demo:smollm2",
        block_size=32,
        speculative_config={"method": "ngram", "prompt_lookup_max": 4},
        plugins={"block": ["suffix"]},
    )
    assert sources["block_size"] == f"{name}:{3 if name != 'a.json' else 4}"
    assert sources["speculative.prompt_lookup_max"] == f"{name}:{7 if name != 'a.json' else 6}"
    assert sources["plugins.block"].startswith(f"{name}:")
    assert sources["speculative.num_speculative_tokens"] == "default"
    assert sources["seed"] == "default"


@pytest.mark.parametrize(("name", "text"), [("a.toml", TOML), ("a.yaml", YAML), ("a.json", JSON)])
def test_a_bad_value_in_a_file_names_its_line(tmp_path, name, text):
    (tmp_path / name).write_text(text.replace("32", "0"))
    with pytest.raises(ConfigError, match=rf"^block_size = 0 \({name}:[34]\): must be an integer from 1 to 1024"):
        load(name, environ={})


def test_an_unknown_key_in_a_file_names_its_line(tmp_path):
    (tmp_path / "a.toml").write_text(TOML.replace("[speculative]", "[speculatve]"))
    with pytest.raises(ConfigError, match=r"'speculatve' \(a.toml:5\). Did you mean 'speculative'?"):
        load("a.toml", environ={})


def test_quoted_numbers_in_files_are_refused(tmp_path):
    (tmp_path / "a.toml").write_text('model = "m"\nblock_size = "16"\n')
    with pytest.raises(ConfigError, match="write 16 without quotes"):
        load("a.toml", environ={})


def test_the_default_file_is_found(tmp_path):
    (tmp_path / "specdec.toml").write_text('model = "here"')
    assert load(environ={})[0].model == "here"
    (tmp_path / "specdec.yaml").write_text("model: there")
    with pytest.raises(ConfigError, match=r"specdec.toml and specdec.yaml are both in"):
        find(tmp_path)


def test_the_file_may_be_named_in_the_environment(tmp_path):
    (tmp_path / "specdec.toml").write_text('model = "here"')
    (tmp_path / "other.toml").write_text('model = "other"')
    assert load(environ={"SPECDEC_CONFIG": "other.toml"})[0].model == "other"
    assert load("specdec.toml", environ={"SPECDEC_CONFIG": "other.toml"})[0].model == "here"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("none.toml", None, "cannot be read"),
        ("a.toml", "model = ", "not valid TOML"),
        ("a.yaml", "model: [", "not valid YAML"),
        ("a.json", "{", "not valid JSON"),
        ("a.json", '{"model": "a", "model": "b"}', "stands twice"),
        ("a.json", "[1]", "must hold a table"),
        ("a.ini", "x", "must end in"),
        ("a.toml", b"\xff\xfe", "cannot be read"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message):
        load(name, environ={})


def test_later_sources_win(tmp_path):
    (tmp_path / "a.toml").write_text('model = "file"\nseed = 1\nblock_size = 4\nmax_num_seqs = 2\n')
    environ = {"SPECDEC_SEED": "2", "SPECDEC_BLOCK_SIZE": "8"}
    config, sources = load("a.toml", {"seed": 3}, environ=environ)
    assert (config.seed, config.block_size, config.max_num_seqs) == (3, 8, 2)
    assert sources["seed"] == "command line"
    assert sources["block_size"] == "environment SPECDEC_BLOCK_SIZE"
    assert sources["max_num_seqs"] == "a.toml:4"


def test_a_whole_table_replaces_and_single_settings_add(tmp_path):
    (tmp_path / "a.toml").write_text(TOML)
    config, sources = load("a.toml", {"speculative": {"method": "suffix"}}, environ={})
    assert config.speculative.options == {}
    assert sources["speculative.method"] == "command line"
    config, sources = load("a.toml", {"speculative.num_speculative_tokens": 6}, environ={})
    assert config.speculative.options == {"prompt_lookup_max": 4}
    assert config.speculative.num_speculative_tokens == 6
    assert sources["speculative.method"] == "a.toml:6"
    config, sources = load("a.toml", {"speculative": None}, environ={})
    assert config.speculative is None
    assert sources["speculative"] == "command line"


def test_single_settings_add_to_a_whole_table_whatever_the_order():
    for overrides in (
        {"speculative": {"method": "ngram"}, "speculative.num_speculative_tokens": 2},
        {"speculative.num_speculative_tokens": 2, "speculative": {"method": "ngram"}},
    ):
        config, _ = load(None, {"model": "m", **overrides}, environ={})
        assert config.speculative.num_speculative_tokens == 2
        assert config.speculative.method == "ngram"


def test_environment_variables_are_parsed():
    environ = {
        "SPECDEC_MODEL": "m",
        "SPECDEC_FUSE": "off",
        "SPECDEC_NUM_THREADS": "none",
        "SPECDEC_KV_CACHE_MEMORY": "2MiB",
        "SPECDEC_STAT_LOGGERS": "logging, other",
        "SPECDEC_SPECULATIVE_CONFIG": '{"method": "ngram", "prompt_lookup_max": 3}',
        "SPECDEC_SPECULATIVE_NUM_SPECULATIVE_TOKENS": "7",
        "SPECDEC_PLUGINS_BLOCK": "a,b",
        "SPECDEC_UNRELATED_THING": "1",
        "SPECDEC_SEED": "",
    }
    config, sources = load(environ=environ)
    assert config.fuse is False
    assert config.num_threads is None
    assert config.kv_cache_memory == "2MiB"
    assert config.stat_loggers == ("logging", "other")
    assert config.speculative.num_speculative_tokens == 7
    assert config.speculative.options == {"prompt_lookup_max": 3}
    assert config.plugins.block == ("a", "b")
    assert sources["fuse"] == "environment SPECDEC_FUSE"


def test_bad_and_misspelt_variables_are_refused():
    with pytest.raises(ConfigError, match=r"block_size = 'x' \(environment SPECDEC_BLOCK_SIZE\): must be an integer"):
        load(environ={"SPECDEC_MODEL": "m", "SPECDEC_BLOCK_SIZE": "x"})
    with pytest.raises(ConfigError, match="Did you mean 'SPECDEC_BLOCK_SIZE'"):
        load(environ={"SPECDEC_MODEL": "m", "SPECDEC_BLOK_SIZE": "4"})


def test_keyword_arguments_win_over_the_environment(monkeypatch):
    monkeypatch.setenv("SPECDEC_SEED", "5")
    monkeypatch.setenv("SPECDEC_SPECULATIVE_CONFIG", '{"method": "ngram"}')
    assert from_kwargs("m").seed == 5
    assert from_kwargs("m").speculative.method == "ngram"
    assert from_kwargs("m", seed=0, speculative_config=None) == EngineConfig(model="m")


def test_a_missing_model_says_how_to_give_it():
    with pytest.raises(ConfigError, match=r"model is not set. Pass --model"):
        load(environ={})


def test_a_misspelt_model_is_told_before_a_missing_one(tmp_path):
    (tmp_path / "a.toml").write_text('modell = "m"\n')
    with pytest.raises(ConfigError, match=r"unknown setting 'modell' \(a.toml:1\). Did you mean 'model'"):
        load("a.toml", environ={})


def test_describe_lists_every_setting_once(tmp_path):
    (tmp_path / "a.toml").write_text(TOML)
    config, sources = load("a.toml", environ={})
    settings = describe(config, sources)
    paths = [setting.path for setting in settings]
    assert len(set(paths)) == len(paths)
    by_path = {setting.path: setting for setting in settings}
    assert by_path["speculative.prompt_lookup_max"].value == 4
    assert by_path["kv_cache_memory"].value == "1GiB"
    assert by_path["model"].origin == "a.toml:2"
    assert by_path["seed"].origin == "default"
    assert "speculative" in [setting.path for setting in describe(EngineConfig(model="m"))]


names = st.text(min_size=1, max_size=8).filter(str.strip)
configs = st.fixed_dictionaries(
    {"model": names},
    optional={
        "block_size": st.integers(1, 64),
        "kv_cache_memory": st.integers(1, 2**40),
        "log_stats_interval": st.floats(1e-3, 1e6),
        "fuse": st.booleans(),
        "max_model_len": st.none() | st.integers(2, 9999),
        "stat_loggers": st.lists(names, max_size=3),
        "plugins": st.fixed_dictionaries(
            {"prefer": st.dictionaries(names, names, max_size=2)}, optional={"allow": st.lists(names, max_size=2)}
        ),
        "verifier_options": st.dictionaries(
            names, st.integers() | st.booleans() | names | st.lists(st.integers()), max_size=2
        ),
        "speculative": st.fixed_dictionaries(
            {"method": names},
            optional={"num_speculative_tokens": st.integers(1, 64), "prompt_lookup_max": st.integers()},
        ),
    },
)


@given(configs)
def test_toml_and_json_output_load_to_the_same_configuration(values):
    config = from_kwargs(**values)
    assert from_kwargs(**tomllib.loads(to_toml(config))) == config
    assert from_kwargs(**json.loads(json.dumps(to_dict(config)))) == config


def test_toml_output_tells_sources(tmp_path):
    (tmp_path / "a.toml").write_text(TOML)
    config, sources = load("a.toml", environ={})
    assert "block_size = 32  # a.toml:3" in to_toml(config, sources).splitlines()


@frozen(kw_only=True)
class Table:
    """Stands for the configuration of a command."""

    port: int = field(default=8000, validator=check.integer(0, 65535))
    names: tuple[str, ...] = field(default=(), converter=check.as_tuple, validator=check.names())
    keys: tuple[str, ...] = field(
        default=(), converter=check.as_tuple, validator=check.names(), metadata={"secret": True}
    )


def test_a_commands_table_is_the_commands(tmp_path):
    """Every command can read a file that has the server's table; only the server looks into it."""
    file = tmp_path / "specdec.toml"
    file.write_text('model = "m"\n\n[server]\nport = 9000\nanything = true\n')
    config, origins = load(file, environ={"SPECDEC_SERVER_PORT": "no number"})
    assert config.model == "m"
    assert not any(path.startswith("server") for path in origins)
    with pytest.raises(ConfigError, match=r"unknown setting 'server.anything' \(.*specdec.toml:5\)"):
        load_table("server", Table, file, environ={})
    file.write_text('model = "m"\nserver = 3\n')
    with pytest.raises(ConfigError, match=r"server = 3 .*: must be a table"):
        load_table("server", Table, file, environ={})
    file.write_text('model = "m"\n[servr]\nport = 1\n')
    with pytest.raises(ConfigError, match="unknown setting 'servr'"):
        load(file, environ={})


def test_a_commands_table_has_the_sources_of_all_settings(tmp_path):
    file = tmp_path / "specdec.toml"
    file.write_text('model = "m"\n[server]\nport = 9000\nnames = ["a"]\n')
    table, origins = load_table("server", Table, file, environ={})
    assert (table, origins) == (
        Table(port=9000, names=("a",)),
        {"server.port": f"{file}:3", "server.names": f"{file}:4", "server.keys": "default"},
    )
    environ = {"SPECDEC_SERVER_PORT": "9001", "SPECDEC_SERVER_NAMES": "b,c"}
    table, origins = load_table("server", Table, file, environ=environ)
    assert table == Table(port=9001, names=("b", "c"))
    assert origins["server.port"] == "environment SPECDEC_SERVER_PORT"
    table, origins = load_table(
        "server", Table, file, {"server.port": 9002}, origins={"server.port": "--port"}, environ=environ
    )
    assert table == Table(port=9002, names=("b", "c"))
    assert origins["server.port"] == "--port"
    file.unlink()
    assert load_table("server", Table, None, environ={}) == (
        Table(),
        dict.fromkeys(("server.port", "server.names", "server.keys"), "default"),
    )


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("SPECDEC_SERVER_PORT", "x", r"server.port = 'x' \(environment SPECDEC_SERVER_PORT\): must be an integer"),
        ("SPECDEC_SERVER_PORT", "70000", "server.port = 70000 .*: must be an integer from 0 to 65535"),
        ("SPECDEC_SERVER_PROT", "1", "unknown setting 'SPECDEC_SERVER_PROT' .*Did you mean 'SPECDEC_SERVER_PORT'"),
    ],
)
def test_a_commands_variables_are_checked(variable, text, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        load_table("server", Table, None, environ={variable: text})


def test_secrets_of_a_table_are_not_shown():
    table = Table(port=1, keys=("one", "two"))
    shown = {setting.path: setting.value for setting in describe(table, {}, "server")}
    assert shown == {"server.port": 1, "server.names": [], "server.keys": "hidden"}
    text = to_toml(from_kwargs("m"), None, {"server": table})
    assert tomllib.loads(text)["server"] == {"port": 1, "names": []}
    assert "# keys is secret: set it by hand" in text.splitlines()
    assert "one" not in text


def test_all_mistakes_of_a_file_are_reported(tmp_path):
    file = tmp_path / "specdec.toml"
    file.write_text('model = "m"\nblok_size = 16\nmax_num_seqs = 0\nseed = -1\n[plugins]\nalow = []\n')
    with pytest.raises(ConfigError) as caught:
        load(file, environ={})
    found = {problem.path: problem.origin for problem in caught.value.problems}
    lines = {"blok_size": 2, "max_num_seqs": 3, "seed": 4, "plugins.alow": 6}
    assert found == {path: f"{file}:{line}" for path, line in lines.items()}
