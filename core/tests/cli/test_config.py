"""``specdec config``."""

import json
import tomllib

import pytest

from specdec.config import from_kwargs, load


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
    assert "not allowed with argument" in err


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
