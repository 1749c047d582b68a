"""The command line as a whole: help, exit codes, one message for a mistake."""

import argparse
import os
import re
import subprocess
import sys

import pytest

from specdec.cli.commands import COMMANDS
from specdec.cli.main import build_list, build_parser, main
from specdec.errors import ModelNotFoundError
from specdec.version import __version__


def test_help_lists_all_commands_with_examples(cli):
    code, out, _ = cli("--help")
    assert code == 0
    for command in COMMANDS:
        assert f"    {command} " in out
    assert "specdec generate --model demo:smollm2" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(cli, command):
    code, out, _ = cli(command, "--help")
    assert code == 0
    assert f"usage: specdec {command}" in out
    assert f"  specdec {command}" in out.partition("examples:")[2]
    assert "SUPPRESS" not in out


def test_no_arguments_show_help(cli):
    code, out, _ = cli()
    assert code == 0
    assert "usage: specdec" in out


def test_version(cli):
    assert cli("--version")[:2] == (0, f"specdec {__version__}\n")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["genrate"], "error: unknown command 'genrate'. Did you mean 'generate'? See: specdec --help\n"),
        (["xyzzy"], "error: unknown command 'xyzzy'. Commands: generate,"),
        (["generate", "--blok-size", "3", "x"], "error: unknown option '--blok-size'. Did you mean --block-size?"),
        (["generate", "--temperatur=3", "x"], "error: unknown option '--temperatur'. Did you mean --temperature?"),
        (
            ["generate", "--speculative.max-repeats", "2", "x"],
            "error: unknown option '--speculative.max-repeats'. An option of the method is given as "
            "--set speculative.max_repeats=VALUE. See:",
        ),
        (
            ["generate", "--speculative.metod", "a", "x"],
            "error: unknown option '--speculative.metod'. Did you mean --spec",
        ),
        (["config", "m", "extra"], "error: unknown argument 'extra'."),
        (
            ["chat", "m", "--tensor-parallel-size", "2"],
            "error: there is no option '--tensor-parallel-size'. One process drives one replica on one device;",
        ),
        (
            ["chat", "m", "--gpu-memory-utilization=0.9"],
            "error: there is no option '--gpu-memory-utilization'. Say how much instead: --kv-cache-memory 8GiB",
        ),
        (["chat", "m", "--speculative-model", "x"], "error: there is no option '--speculative-model'. Write it into"),
        (["chat", "m", "--logprobs", "3"], "error: unknown option '--logprobs'."),
        (["generate", "--block-size"], "error: --block-size needs one value. See: specdec generate --help"),
        (["config", "m", "--json=3"], "error: --json takes no value, but has '3'. See: specdec config --help"),
        (["bench", "m", "--temperature", "hot"], "error: --temperature = 'hot': must be a number."),
        (["bench", "m", "--rounds", "0"], "error: --rounds: '0' is not an integer of at least 1. See: specdec bench"),
        (
            ["generate", "--logit-bias", "[]", "x"],
            "error: logit_bias = '[]' (--logit-bias): must be a JSON object such",
        ),
        (["generate", "--logit-bias", "[]", "x"], """ as '{"name": "value"}'."""),
        (["generate", "--stop-token-ids", "a,b", "x"], "error: stop_token_ids = 'a,b' (--stop-token-ids): must be int"),
        (["plugins", "chek"], "error: unknown action 'chek'. Did you mean 'check'? See: specdec plugins --help"),
        (["plugins", "unlike"], "error: unknown action 'unlike'. There are: list, info, check. See: specdec plugins"),
        (["plugins", "check"], "error: NAME must be given. See: specdec plugins check --help"),
        (
            ["plugins", "check", "x", "--kind", "propser"],
            "error: --kind = 'propser': must be 'proposer', 'head', 'verifier', 'attention_backend', "
            "'sampling_backend', 'grammar', 'logits_processor', 'stat_logger' or 'command'. Did you mean 'proposer'?",
        ),
        (["generate", "m", "--seed", "1", "p"], "error: unknown argument 'p'. Only PROMPT can be given without an"),
        (["generate", "--temp", "3", "x"], "error: unknown option '--temp'."),
        (["generate", "x"], "error: model is not set. Pass --model"),
        (["generate", "--model", "m", "--block-size", "x", "p"], "error: block_size = 'x' (--block-size): must be an"),
        (["generate", "--model", "m", "--block-size", "0", "p"], "error: block_size = 0 (--block-size): must be an"),
        (["generate", "--model", "m", "--temperature", "-1", "p"], "error: temperature is -1.0"),
        (["generate", "--model", "m", "--top-p", "2", "p"], "error: top_p is 2.0"),
        (["generate", "--model", "m", "--min-tokens", "9", "--max-tokens", "3", "p"], "error: min_tokens (9) is above"),
        (["generate", "--model", "m", "--set", "block_size", "p"], "error: --set block_size: write --set PATH=VALUE"),
        (["generate", "--model", "m", "--set", "blok=1", "p"], "error: unknown setting 'blok' (--set)."),
        (["generate", "--model", "m", "--config", "none.toml", "p"], "error: configuration file none.toml cannot be"),
        (
            ["generate", "--model", "m", "--speculative-config", "{", "p"],
            "error: speculative = '{' (--speculative-config): must be a JSON object",
        ),
        (
            [
                "generate",
                "--model",
                "m",
                "--speculative-config",
                '{"method": "ngram", "num_speculative_tokens": 0}',
                "p",
            ],
            "error: speculative.num_speculative_tokens = 0 (--speculative-config): must be an integer from 1 to 64.",
        ),
        (
            ["generate", "--model", "m", "--speculative.num-speculative-tokens", "1000", "p"],
            "error: speculative.num_speculative_tokens = 1000 (--speculative.num-speculative-tokens): must be an "
            "integer from 1 to 64.",
        ),
        (
            ["generate", "--model", "m", "--speculative-config", '{"num_speculative_tokens": 4}', "p"],
            "error: speculative is given (num_speculative_tokens=4) without 'method' or 'model'",
        ),
    ],
)
def test_mistakes_are_one_message_and_exit_code_2(cli, fake_engine, argv, message):
    code, out, err = cli(*argv)
    assert code == 2
    assert out == ""
    assert message in err
    assert err.startswith("error: ")
    assert err.count("error:") == 1
    assert "Traceback" not in err
    assert fake_engine == []


def test_ctrl_c_is_130(cli, monkeypatch):
    def interrupt(config):
        raise KeyboardInterrupt

    monkeypatch.setattr("specdec.cli.engines.open_llm", interrupt)
    code, _, err = cli("generate", "--model", "m", "p")
    assert code == 130
    assert "Traceback" not in err


def test_errors_of_the_engine_are_shown(cli, monkeypatch):
    def missing(config):
        raise ModelNotFoundError(f"no file {config.model!r}")

    monkeypatch.setattr("specdec.cli.engines.open_llm", missing)
    assert cli("generate", "--model", "nowhere", "p") == (2, "", "error: model: no file 'nowhere'\n")


def test_internal_faults_keep_their_traceback(monkeypatch):
    def broken(config):
        raise ZeroDivisionError

    monkeypatch.setattr("specdec.cli.engines.open_llm", broken)
    with pytest.raises(ZeroDivisionError):
        main(["generate", "--model", "m", "p"])


def test_a_closed_pipe_is_no_traceback(tmp_path):
    command = f"{sys.executable} -m specdec.cli.main config --model m | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, env=os.environ)
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk_is_no_traceback(tmp_path):
    command = f"{sys.executable} -m specdec.cli.main config --model m > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, env=os.environ)
    assert done.returncode == 1
    assert done.stderr == "error: nothing can be written any more: no space left on device\n"


def test_help_imports_no_torch(tmp_path):
    code = (
        "import sys; from specdec.cli.main import main; main(['--help']); main(['config', '--model', 'm']);"
        "sys.exit(bool({'torch', 'transformers', 'numba'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True).returncode == 0


def test_only_the_command_that_was_typed_is_imported(tmp_path):
    code = (
        "import sys; from specdec.cli.main import main; main(['config', '--model', 'm']);"
        "sys.exit(bool({'specdec.cli.chat', 'specdec.cli.bench'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True).returncode == 0


def test_advice_for_options_of_vllm_names_what_exists():
    """No option has advice and exists as well; options that the advice names exist."""
    from specdec.cli.vllm_options import ADVICE

    commands = _commands(build_parser(None))
    for name in ("generate", "chat", "bench", "config", "serve"):
        if name in commands:
            assert not set(ADVICE) & set(commands[name]._option_string_actions), name
    known = {option for parser in commands.values() for option in parser._option_string_actions}
    named = {word for text in ADVICE.values() for word in re.findall(r"--[a-z][a-z-]+", text)}
    assert named <= known


@pytest.mark.parametrize(
    ("extras", "told"),
    [
        (["--no-enable-log-requests"], "Requests are not written to the log"),
        (["-O3"], "without a compiler"),
        (["-tp=2"], "One process drives one replica"),
        (["--root-path", "/x"], "proxy"),
        (["b"], "For several values an option that takes them is repeated: --stop A --stop B."),
    ],
)
def test_forms_of_vllms_command_lines(extras, told):
    from specdec.cli.parser import unknown_arguments

    assert told in unknown_arguments(extras, ["--stop", "--port"], ["MODEL"])


def test_every_command_takes_the_model_by_the_same_rule():
    """``--model`` everywhere a model is loaded, and MODEL where it is the only argument."""
    for name, parser in _commands(build_parser(None)).items():
        positional = [action.metavar or action.dest for action in parser._actions if not action.option_strings]
        loads = "--model" in parser._option_string_actions and name != "bench.serve"
        if loads and positional:
            assert positional == ["MODEL"] or "MODEL" not in positional, name
        assert loads == (name not in {"plugins", "new-plugin", "bench.serve", "top"}), name
        if loads and name not in ("generate", "train"):
            assert positional == ["MODEL"], name


def test_one_thing_has_one_name():
    """What went by two names in different commands."""
    for name, parser in _commands(build_parser(None)).items():
        options = set(parser._option_string_actions)
        assert not options & {"--dataset", "--file", "--k", "--max-draft-tokens", "--out"}, name
        if "--json" in options:
            assert parser._option_string_actions["--json"].nargs == 0, name


def _commands(parser):
    action = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return action.choices


def test_ctrl_c_while_the_command_line_is_imported_is_130(monkeypatch):
    from specdec.cli import entry

    class Interrupted:
        def find_spec(self, name, path=None, target=None):
            if name == "specdec.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "specdec.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert entry.main() == 130


def test_advice_for_vllms_options_names_no_method():
    """The core knows none; what belongs to one is found among the installed."""
    from specdec.cli.vllm_options import ADVICE
    from specdec.registry.catalogue import DISTRIBUTIONS

    words = set(re.findall(r"\w+", " ".join((*ADVICE, *ADVICE.values()))))
    assert not words & set(DISTRIBUTIONS["proposer"])


def test_the_list_of_commands_says_what_their_parsers_say():
    assert build_list().format_help() == build_parser(None).format_help()


def test_the_version_is_told_before_parsers_are_made(tmp_path):
    code = (
        "import sys; sys.argv = ['specdec', '--version']; from specdec.cli.entry import main; main();"
        "sys.exit(str(sorted({'argparse', 'attrs', 'specdec.cli.main', 'specdec.registry'} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"specdec {__version__}\n", "[]\n")


def imported(arguments, names, folder):
    """Which of the named modules a command imports, in a process of its own."""
    code = (
        f"import sys; from specdec.cli.main import main; main({arguments});"
        f"sys.exit(str(sorted({set(names)} & set(sys.modules))))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    return done.stderr


def test_help_makes_no_parsers_of_built_in_commands(tmp_path):
    assert imported(["--help"], [command.module for command in COMMANDS.values()], tmp_path) == "[]\n"


def test_listing_plugins_imports_nothing_heavy(tmp_path):
    heavy = ("torch", "transformers", "numba", "numpy", "safetensors", "huggingface_hub")
    assert imported(["plugins"], heavy, tmp_path) == "[]\n"


def test_help_of_a_command_imports_nothing_for_files_tables_or_other_commands(tmp_path):
    unneeded = ("rich", "yaml", "asyncio", "specdec.cli.chat", "specdec_server")
    assert imported(["generate", "--help"], unneeded, tmp_path) == "[]\n"
