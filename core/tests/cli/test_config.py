"""``specdec config``."""

import json
import tomllib

import pytest

from specdec import LLM, AsyncLLM
from specdec.config import from_kwargs, load
from specdec.errors import PluginNotFoundError


def table(out):
    return {line.split()[0]: line for line in out.splitlines()[1:]}


def test_every_setting_with_its_origin(cli, tmp_path, monkeypatch):
    (tmp_path / "specdec.toml").write_text('model = "m"\nblock_size = 32\n')
    monkeypatch.setenv("SPECDEC_MAX_NUM_SEQS", "8")
    code, out, err = cli("config", "--seed", "5")
    lines = table(out)
    assert (code, err) == (0, "")
    assert lines["block_size"].split()[1:] == ["32", "specdec.toml:2"]
    assert lines["max_num_seqs"].split()[1:] == ["8", "environment", "SPECDEC_MAX_NUM_SEQS"]
    assert lines["seed"].split()[1:] == ["5", "--seed"]
    assert lines["fuse"].split()[1:] == ["true", "default"]
    assert lines["speculative"].split()[1:] == ["not", "set", "default"]


def test_json(cli):
    _, out, _ = cli("config", "--model", "m", "--seed", "5", "--json")
    found = json.loads(out)
    found["settings"].pop("server", None)
    assert from_kwargs(**found["settings"]) == from_kwargs("m", seed=5)
    assert found["sources"]["seed"] == "--seed"
    assert found["sources"]["fuse"] == "default"


def test_toml_can_be_used_as_a_file(cli, tmp_path):
    argv = ["--model", "m", "--kv-cache-memory", "64MiB", "--plugins.block", "a,b"]
    _, out, _ = cli("config", *argv, "--toml")
    tomllib.loads(out)
    (tmp_path / "again.toml").write_text(out)
    config, _ = load("again.toml", environ={})
    assert config == from_kwargs("m", kv_cache_memory="64MiB", plugins={"block": ["a", "b"]})


def test_the_methods_options_are_listed_also_where_nothing_sets_them(cli):
    pytest.importorskip("specdec_ngram")
    _, out, _ = cli(
        "config", "--model", "m", "--speculative.method", "ngram", "--set", "speculative.prompt_lookup_max=3"
    )
    names = list(table(out))
    assert table(out)["speculative.prompt_lookup_max"].split()[1:] == ["3", "--set"]
    assert table(out)["speculative.prompt_lookup_min"].split()[1:] == ["not", "set", "default"]
    assert names.index("speculative.prompt_lookup_min") + 1 == names.index("verifier")


def test_json_and_toml_exclude_each_other(cli):
    code, _, err = cli("config", "--model", "m", "--json", "--toml")
    assert code == 2
    assert "--toml and --json exclude each other: give one of them." in err


def test_the_model_may_come_from_nowhere_else(cli):
    code, _, err = cli("config")
    assert code == 2
    assert "model is not set. Pass --model" in err


def test_an_unknown_method_is_noticed_without_a_model(cli):
    code, _, err = cli("config", "--model", "m", "--speculative.method", "ngrm")
    assert code == 2
    assert err.startswith("error: No proposer named 'ngrm'. Did you mean 'ngram'")


def test_options_of_the_method_are_checked_and_located(cli, tmp_path):
    pytest.importorskip("specdec_ngram")
    (tmp_path / "specdec.toml").write_text('model = "m"\n[speculative]\nmethod = "ngram"\nprompt_lookup_maxx = 4\n')
    code, _, err = cli("config")
    assert code == 2
    assert err == (
        "error: unknown setting 'speculative.prompt_lookup_maxx' (specdec.toml:4). Did you mean 'prompt_lookup_max'?\n"
    )
    (tmp_path / "specdec.toml").write_text('model = "m"\n[speculative]\nmethod = "ngram"\nprompt_lookup_max = 0\n')
    _, _, err = cli("config")
    assert err.startswith("error: speculative.prompt_lookup_max = 0 (specdec.toml:4): must be an integer from 1")


def test_vllms_keys_pass(cli):
    pytest.importorskip("specdec_ngram")
    given = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
    code, out, _ = cli("config", "--model", "m", "--speculative-config", given)
    assert code == 0
    assert table(out)["speculative.prompt_lookup_min"].split()[1:] == ["2", "--speculative-config"]


def test_speculation_can_be_switched_off(cli, tmp_path):
    (tmp_path / "specdec.toml").write_text('model = "m"\n[speculative]\nmethod = "ngram"\n')
    _, out, _ = cli("config", "--speculative-config", "none")
    assert table(out)["speculative"].split()[1:] == ["not", "set", "--speculative-config"]


def test_the_servers_table_is_shown_and_checked(cli, tmp_path, monkeypatch):
    """By the mechanism of all settings: file, environment, options, origins; keys stay secret."""
    pytest.importorskip("specdec_server")
    (tmp_path / "specdec.toml").write_text('model = "m"\n[server]\nhost = "0.0.0.0"\napi_key = ["sesame"]\n')
    monkeypatch.setenv("SPECDEC_SERVER_MAX_CHOICES", "5")
    code, out, err = cli("config", "--port", "9000", "--set", "server.retry_after=3")
    lines = table(out)
    assert (code, err) == (0, "")
    assert lines["server.host"].split()[1:] == ["0.0.0.0", "specdec.toml:3"]
    assert lines["server.port"].split()[1:] == ["9000", "--port"]
    assert lines["server.retry_after"].split()[1:] == ["3", "--set"]
    assert lines["server.max_choices"].split()[1:] == ["5", "environment", "SPECDEC_SERVER_MAX_CHOICES"]
    assert lines["server.page"].split()[1:] == ["true", "default"]
    assert lines["server.api_key"].split()[1:] == ["hidden", "specdec.toml:4"]
    _, out, _ = cli("config", "--json")
    assert json.loads(out)["settings"]["server"]["host"] == "0.0.0.0"
    assert "sesame" not in out
    _, out, _ = cli("config", "--toml")
    assert tomllib.loads(out)["server"]["max_choices"] == 5
    (tmp_path / "specdec.toml").write_text('model = "m"\n[server]\nprot = 1\n')
    code, _, err = cli("config")
    assert code == 2
    assert err == "error: unknown setting 'server.prot' (specdec.toml:3). Did you mean 'port'?\n"


def test_a_commands_table_is_no_setting_of_other_commands(cli):
    code, _, err = cli("generate", "--model", "m", "--set", "server.port=1", "text")
    assert code == 2
    assert "unknown setting 'server'" in err


def test_the_model_is_an_argument_or_an_option(cli):
    _, out, _ = cli("config", "one")
    assert table(out)["model"].split()[1:] == ["one", "MODEL"]
    code, _, err = cli("config", "one", "--model", "two")
    assert (code, err) == (2, "error: model is given twice: 'one' and 'two'.\n")
    code, _, err = cli("config", "--model", "two", "one")
    assert (code, err) == (2, "error: model is given twice: 'two' and 'one'.\n")


def test_a_method_that_needs_a_checkpoint_says_which(cli):
    pytest.importorskip("specdec_eagle")
    code, _, err = cli("config", "--model", "m", "--speculative.method", "eagle")
    assert (code, err) == (
        2,
        "error: speculative.model is not set. It must be given: the head: a directory or a model id.\n",
    )


def test_mistakes_about_several_plugins_and_tables_are_reported_together(cli, tmp_path):
    pytest.importorskip("specdec_server")
    (tmp_path / "specdec.toml").write_text('model = "m"\n[verifier_options]\nx = 1\n[server]\nprot = 8000\n')
    code, out, err = cli("config", "--speculative.method", "ngrm", "--attention-backend", "spda")
    assert (code, out) == (2, "")
    assert err.startswith("error: 4 settings are wrong:\n")
    for words in ("No proposer named 'ngrm'", "'verifier_options.x' (specdec.toml:", "'spda'", "'server.prot'"):
        assert words in err


@pytest.mark.parametrize("command", [["generate", "hi"], ["config"]])
def test_a_plugins_mistakes_name_their_place(command, cli, tmp_path):
    """Whoever finds the mistake, the engine as it starts or this command, says where the value stands."""
    pytest.importorskip("specdec_ngram")
    text = 'model = "m"\nverifier = "nosuch"\n[speculative]\nmethod = "ngram"\nprompt_lookup_max = "x"\n'
    (tmp_path / "specdec.toml").write_text(text)
    code, _, err = cli(*command)
    assert code == 2
    assert "speculative.prompt_lookup_max = 'x' (specdec.toml:5): must be an integer" in err
    assert "No verifier named 'nosuch'" in err
    assert "(verifier comes from specdec.toml:2)" in err


def test_mistakes_found_with_the_model_name_their_place(cli, tmp_path):
    (tmp_path / "specdec.toml").write_text('\nmodel = "./nowhere"\n')
    code, _, err = cli("generate", "hi")
    assert code == 2
    assert err.endswith("\n  model comes from specdec.toml:2\n")
    _, _, err = cli("generate", "--model", "./nowhere", "hi")
    assert "comes from" not in err, "nobody has to look for what was typed"


def test_programs_are_told_which_variable_is_wrong(monkeypatch):
    monkeypatch.setenv("SPECDEC_VERIFIER", "nosuch")
    with pytest.raises(PluginNotFoundError) as caught:
        LLM("m")
    assert caught.value.path == "verifier"
    assert caught.value.__notes__ == ["verifier comes from environment SPECDEC_VERIFIER"]


@pytest.mark.parametrize("engine", [LLM, AsyncLLM])
def test_the_environment_speaks_of_speculation_when_a_program_does_not(engine, monkeypatch):
    monkeypatch.setenv("SPECDEC_SPECULATIVE_CONFIG", '{"method": "nosuch"}')
    with pytest.raises(PluginNotFoundError, match="nosuch"):
        engine("m")
    with pytest.raises(PluginNotFoundError, match="other"):
        engine("m", speculative_config={"method": "other"})
