"""``specdec chat`` and the marks of accepted tokens."""

import io

import pytest
from rich.console import Console

from specdec.cli.chat import Conversation
from specdec.cli.marking import MarkedStream
from specdec.outputs import CompletionOutput


@pytest.fixture
def talk(cli, fake_engine, monkeypatch):
    def run(text, *argv):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        code, out, err = cli("chat", "m", *argv)
        return code, out, err, fake_engine[-1]

    return run


def test_answers_without_a_terminal(talk):
    code, out, err, engine = talk("hello there\nsecond message\n")
    assert (code, out, err) == (0, "hello there\nsecond message\n", "")
    assert engine.closed


def test_the_conversation_is_kept_and_can_be_reset(talk):
    _, _, _, engine = talk("one\ntwo\n/reset\nthree\n", "--system", "be brief")
    system = {"role": "system", "content": "be brief"}
    sent = [messages for messages, _ in engine.calls]
    assert sent[1] == [
        system,
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "two"},
    ]
    assert sent[2] == [system, {"role": "user", "content": "three"}]


def test_there_is_no_length_limit_unless_given(talk):
    assert talk("one\n")[3].calls[0][1].max_tokens is None
    assert talk("one\n", "--max-tokens", "5")[3].calls[0][1].max_tokens == 5


def test_a_refused_message_is_told_and_forgotten(talk):
    code, _, err, engine = talk("one\ntoo long\ntwo\n")
    assert code == 0
    assert err == "error: the prompt is longer than max_model_len\n"
    assert [m["content"] for m in engine.calls[-1][0]] == ["one", "one", "two"]


def test_commands(talk):
    _, out, _, engine = talk("/help\n/stats\n/rest\n/show-accepted\n/show-accepted\n/exit\nnot sent\n")
    assert "/show-accepted   mark accepted draft tokens" in out
    assert "0 tokens" in out
    assert "Unknown command /rest. Did you mean /reset?" in out
    assert "accepted draft tokens, by draft position: 0 1 2 3 4+" in out
    assert "No marks." in out
    assert engine.calls == []


def test_ctrl_c_stops_the_answer_only(fake_engine, capsys):
    from specdec.cli import engines
    from specdec.config import from_kwargs
    from specdec.sampling.params import SamplingParams

    class Interrupted(engines.open_async_llm):
        async def chat(self, messages, params):
            async for output in super().chat(messages, params):
                yield output
                if messages[-1]["content"].startswith("stop"):
                    raise KeyboardInterrupt

    engine = Interrupted(from_kwargs("m"))
    talk = Conversation(engine, SamplingParams(), Console(highlight=False), None, marks=False)
    import sys

    original = sys.stdin
    sys.stdin = io.StringIO("stop after one word\nnext\n")
    try:
        talk.hold(interactive=False)
    finally:
        sys.stdin = original
    assert [m["content"] for m in talk.messages] == ["stop after one word", "stop", "next", "next"]
    assert "(stopped)" in capsys.readouterr().out


def test_ctrl_c_at_the_prompt_leaves(cli, fake_engine, monkeypatch):
    class Stdin(io.StringIO):
        def readline(self, *args):
            raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", Stdin())
    code, _, err = cli("chat", "m")
    assert code == 130
    assert "Traceback" not in err
    assert fake_engine[-1].closed


# --- marks --------------------------------------------------------------------------------------


class Letters:
    """Token i is a word of i letters; token 0 completes no text of its own (as half of an emoji)."""

    def __init__(self):
        self.held = False

    def append(self, token_ids):
        (token,) = token_ids
        if token == 0:
            self.held = True
            return ""
        text = ("é" if self.held else "") + "x" * token
        self.held = False
        return text


def render(steps, *, terminal):
    file = io.StringIO()
    console = Console(
        file=file, force_terminal=terminal, highlight=False, color_system="standard" if terminal else None
    )
    stream = MarkedStream(console, Letters())
    for text, token_ids, origins in steps:
        stream.update(CompletionOutput(index=0, text=text, token_ids=token_ids, token_origins=origins))
    return file.getvalue()


def test_marks_without_a_terminal_are_brackets():
    assert render([("xxxxxx", [1, 2, 3], [-1, 0, 1])], terminal=False) == "x[xx][xxx]"


def test_marks_on_a_terminal_are_colours():
    shown = render([("xxxxxx", [1, 2, 3], [-1, 0, 1])], terminal=True)
    assert shown == "x\x1b[4;32mxx\x1b[0m\x1b[4;36mxxx\x1b[0m"


def test_marks_when_the_text_arrives_in_pieces():
    steps = [("x", [1], [-1]), ("xxxxxx", [1, 2, 3], [-1, 0, 1]), ("xxxxxxx", [1, 2, 3, 1], [-1, 0, 1, -1])]
    assert render(steps, terminal=False) == "x[xx][xxx]x"


def test_text_that_is_held_back_comes_later():
    """A possible stop string holds text back; when it comes, it is still marked."""
    steps = [("x", [1, 2], [-1, 0]), ("xx", [1, 2, 2], [-1, 0, 1]), ("xxxxx", [1, 2, 2], [-1, 0, 1])]
    assert render(steps, terminal=False) == "x[x][x][xx]"


def test_text_cut_by_a_stop_string_is_never_shown():
    assert render([("xx", [1, 5], [-1, 0])], terminal=False) == "x[x]"


def test_tokens_without_text_of_their_own():
    assert render([("xéx", [1, 0, 1], [-1, 0, 1])], terminal=False) == "x[éx]"


def test_text_at_the_end_that_no_token_owns():
    assert render([("x!", [1], [0])], terminal=False) == "[x]!"


def test_control_characters_do_not_reach_a_terminal():
    assert render([("\x1b]0;title\x07a\tb\nc", [1], [-1])], terminal=True) == "␛]0;title␇a\tb\nc"


def test_without_a_terminal_text_is_exact():
    file = io.StringIO()
    MarkedStream(Console(file=file), None).update(CompletionOutput(index=0, text="a\r\x1b[1mb", token_ids=[1]))
    assert file.getvalue() == "a\r\x1b[1mb"


def test_brackets_in_the_text_are_not_markup():
    file = io.StringIO()
    stream = MarkedStream(Console(file=file, highlight=False), None)
    stream.update(CompletionOutput(index=0, text="a[bold]b :smile:", token_ids=[1]))
    assert file.getvalue() == "a[bold]b :smile:"
