"""``specdec generate`` on an engine that needs no model."""

import io
import json

import pytest


def test_text_goes_to_standard_output(cli, fake_engine):
    code, out, err = cli("generate", "--model", "m", "--max-tokens", "9", "one two three")
    assert (code, out, err) == (0, "one two three\n", "")
    assert fake_engine[0].closed


def test_several_prompts_have_headlines(cli, fake_engine):
    _, out, _ = cli("generate", "--model", "m", "--max-tokens", "9", "one", "two words")
    assert out == "--- 1\none\n--- 2\ntwo words\n"


def test_options_reach_the_engine(cli, fake_engine):
    options = [
        *("--block-size", "8", "--no-fuse", "--temperature", "0.5", "--stop", "a, b", "--stop", "c"),
        *("--stop-token-ids", "3,4", "--logit-bias", '{"5": 1.5}', "--ignore-eos", "--seed", "3"),
        *("--sampling.seed", "4", "--max-tokens", "none"),
    ]
    cli("generate", "--model", "m", *options, "p")
    engine = fake_engine[0]
    _, params, _ = engine.calls[0]
    assert (engine.config.block_size, engine.config.fuse, engine.config.seed) == (8, False, 3)
    assert (params.temperature, params.stop, params.stop_token_ids) == (0.5, ("a, b", "c"), (3, 4))
    assert (params.logit_bias, params.ignore_eos, params.seed, params.max_tokens) == ({5: 1.5}, True, 4, None)


def test_every_sampling_field_has_an_option(cli):
    import attrs

    from specdec.sampling.params import SamplingParams

    _, out, _ = cli("generate", "--help")
    missing = [
        f.name for f in attrs.fields(SamplingParams) if f"{f.name.replace('_', '-')} " not in out.replace(",", " ")
    ]
    assert missing == []


def test_defaults_are_those_of_the_class(cli, fake_engine):
    from specdec.sampling.params import SamplingParams

    _, _, err = cli("generate", "--model", "m", "p")
    assert fake_engine[0].calls[0][1] == SamplingParams()
    assert err == "note: 1 of the outputs end at --max-tokens 16, the default.\n"


def test_json_is_one_object_a_line(cli, fake_engine):
    _, out, _ = cli("generate", "--model", "m", "--json", "--max-tokens", "9", "a bb", "c")
    first, second = map(json.loads, out.splitlines())
    assert first["outputs"][0] == {
        "index": 0,
        "text": "a bb",
        "token_ids": [1, 2],
        "finish_reason": "length",
        "stop_reason": None,
        "cumulative_logprob": None,
        "logprobs": None,
    }
    assert first["spec_stats"]["mean_acceptance_length"] == 2.0
    assert second["prompt"] == "c"


def test_prompts_from_files(cli, fake_engine, tmp_path):
    lines = [
        '"just text"',
        '{"prompt": "a prompt", "id": "named"}',
        '{"prompt_token_ids": [4, 5]}',
        "",
        '{"turns": ["hello", "second turn"]}',
        '{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}',
    ]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    (tmp_path / "letter.txt").write_text("dear all,\nhello\n")
    _, out, _ = cli("generate", "--model", "m", "--max-tokens", "9", "--prompts", "p.jsonl")
    prompts = fake_engine[0].calls[0][0]
    assert prompts == [
        "just text",
        "a prompt",
        {"prompt_token_ids": [4, 5]},
        {"prompt_token_ids": [1, 7]},
        {"prompt_token_ids": [2, 7]},
    ]
    assert "--- named\na prompt" in out
    _, out, _ = cli("generate", "--model", "m", "--max-tokens", "9", "--prompts", "letter.txt")
    assert out == "dear all, hello\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.jsonl", "{", "p.jsonl:1 is not JSON"),
        ("p.jsonl", '"ok"\n{"promt": "x"}', 'p.jsonl:2: a prompt is {"prompt"'),
        ("p.jsonl", "", "holds no prompts"),
        ("none.txt", None, "cannot be read"),
    ],
)
def test_bad_prompt_files(cli, fake_engine, tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    code, _, err = cli("generate", "--model", "m", "--prompts", name)
    assert code == 2
    assert message in err
    assert fake_engine == []


def test_standard_input(cli, fake_engine, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    assert cli("generate", "--model", "m", "--max-tokens", "9")[1] == "from a pipe\n"


def test_no_prompt_on_a_terminal(cli, fake_engine, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("sys.stdin", terminal)
    code, _, err = cli("generate", "--model", "m")
    assert (code, err) == (2, "error: no prompt: give one as an argument, with --prompts, or on standard input.\n")


@pytest.mark.parametrize(("options", "told"), [((), "loading m …\n"), (("--no-progress",), "")])
def test_a_terminal_is_told_that_the_model_is_loaded(cli, fake_engine, monkeypatch, options, told):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr("specdec.cli.generate.sys.stderr", terminal)
    cli("generate", "--model", "m", "--max-tokens", "9", *options, "p")
    assert terminal.getvalue() == told


def test_an_empty_prompt_is_the_engines_to_refuse(cli, fake_engine):
    assert cli("generate", "--model", "m", "") == (2, "", "error: the prompt is empty\n")
    assert fake_engine[0].closed


def test_chat_uses_the_template(cli, fake_engine):
    cli("generate", "--model", "m", "--max-tokens", "9", "--chat", "--system", "be brief", "hello")
    assert fake_engine[0].calls[0][0] == [{"prompt_token_ids": [2, 7]}]


def test_stats_go_to_standard_error(cli, fake_engine):
    _, out, err = cli(
        "generate", "--model", "m", "--max-tokens", "9", "--stats", "--speculative.method", "ngram", "a b c"
    )
    assert out == "a b c\n"
    assert "3 tokens" in err
    assert "acceptance length" in err
    assert "100 0 %" in err


def test_stats_without_anything_drafted(cli, fake_engine):
    """Known fault 74: summaries work when nothing was drafted."""
    code, _, err = cli("generate", "--model", "m", "--max-tokens", "9", "--stats", "a b c")
    assert code == 0
    assert "acceptance" not in err
    assert "nan" not in err.lower()


def test_failed_requests_are_named(cli, fake_engine, monkeypatch):
    from specdec.cli import generate

    original = generate.write_text

    def fail(prompts, outputs):
        outputs[0].outputs[0].finish_reason = "error"
        outputs[0].outputs[0].error = "the logits were NaN"
        original(prompts, outputs)

    monkeypatch.setattr("specdec.cli.generate.write_text", fail)
    code, _, err = cli("generate", "--model", "m", "--max-tokens", "9", "p")
    assert (code, err) == (1, "error: request 0: the logits were NaN\n")
