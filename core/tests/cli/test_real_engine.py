"""Commands on a real engine with a tiny random model."""

import io
import json

import pytest

pytest.importorskip("specdec_ngram")

NGRAM = [
    "--speculative-config",
    '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1}',
    "--speculative.speculation",
    "always",
]
FAST = ["--dtype", "float32", "--kv-cache-memory", "8MiB", "--num-threads", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from specdec.testing.models import tiny_model

    return str(tiny_model("llama", tmp_path_factory.mktemp("models") / "tiny"))


def test_generate_is_the_same_with_speculation(cli, model):
    argv = ["generate", "--model", model, *FAST, "--json", "--temperature", "0", "--max-tokens", "24", "--ignore-eos"]
    prompt = "the quick brown fox and the quick brown fox and the quick"
    _, plain, err = cli(*argv, prompt)
    assert err == ""
    _, ngram, _ = cli(*argv, *NGRAM, prompt)
    first, second = json.loads(plain), json.loads(ngram)
    assert first["outputs"] == second["outputs"]
    assert len(first["outputs"][0]["token_ids"]) == 24
    assert second["spec_stats"]["num_drafts"] > 0


def test_sampled_text_is_the_same_with_speculation(cli, model):
    argv = ["generate", "--model", model, *FAST, "--temperature", "0.8", "--max-tokens", "24", "--seed", "3", "a a a a"]
    assert cli(*argv)[1] == cli(*argv, *NGRAM)[1]


def test_chat_marks_accepted_tokens(cli, model, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("go on and on and on\n/stats\n/show-accepted\ngo on and on\n"))
    argv = ["chat", model, *FAST, "--temperature", "0", "--max-tokens", "32", "--ignore-eos", "--show-accepted", *NGRAM]
    code, out, err = cli(*argv)
    assert (code, err) == (0, "")
    assert "acceptance length" in out
    marked, plain = out.splitlines()[0], out.rpartition("No marks.\n")[2]
    assert "[" in marked
    assert plain.strip()


def test_bench_compares(cli, model):
    argv = [
        "bench",
        model,
        *FAST,
        *NGRAM,
        "--num-prompts",
        "2",
        "--max-tokens",
        "12",
        "--rounds",
        "2",
        "--output-json",
        "-",
    ]
    code, out, _ = cli(*argv, "--prompts", "mt_bench")
    plain, ngram = json.loads(out)["variants"]
    assert code == 0
    assert ngram["share_identical_to_plain"] == 1.0
    assert plain["stats"]["num_drafts"] == 0
    assert plain["tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model", "no/such/model", "hi"], "no/such/model"),
        (["--speculative.method", "ngrm", "hi"], "No proposer named 'ngrm'. Did you mean 'ngram'"),
        (["--max-model-len", "8", "a b c d e f g h i j k l m n o p"], "max_model_len"),
        ([""], "empty"),
        (["--kv-cache-memory", "1KB", "hi"], "kv_cache_memory"),
        (["--stop-token-ids", "99999", "hi"], "99999"),
        (["--verifier", "mach", "hi"], "No verifier named 'mach'. Did you mean 'match'"),
        (["--attention-backend", "spda", "hi"], "Did you mean 'sdpa'"),
    ],
)
def test_bad_input_is_one_message(cli, model, argv, message):
    given = [] if "--model" in argv else ["--model", model]
    code, out, err = cli("generate", *given, *FAST, *argv)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.startswith("error: ")
    assert "Traceback" not in err
