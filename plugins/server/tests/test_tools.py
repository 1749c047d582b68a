"""Tool calls in a model's text, whole and streamed; conversations for templates."""

from __future__ import annotations

import json

import pytest

from specdec_server.api.messages import for_template
from specdec_server.api.tools import HeldText, find_calls, read_choice
from specdec_server.http.errors import APIError

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
TIME = {"type": "function", "function": {"name": "time"}}
CHOICE = read_choice([WEATHER, TIME], None)
CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'


@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        (CALL, "", ["weather"]),
        (f"<tool_call>\n{CALL}\n</tool_call>", "", ["weather"]),
        (f"Let me see. <tool_call>{CALL}</tool_call>", "Let me see. ", ["weather"]),
        (f'<tool_call>{CALL}</tool_call>\n<tool_call>{{"name": "time"}}</tool_call>', "\n", ["weather", "time"]),
        (f"[TOOL_CALLS] [{CALL}]", "", ["weather"]),
        ('<|python_tag|>{"name": "weather", "parameters": {"city": "Oslo"}}', "", ["weather"]),
        (f"```json\n{CALL}\n```", "", ["weather"]),
        ('{"function": {"name": "weather", "arguments": {"city": "Oslo"}}}', "", ["weather"]),
        ("plain text", "plain text", []),
        ('{"name": "unknown", "arguments": {}}', '{"name": "unknown", "arguments": {}}', []),
        ('{"name": "weather", "argum', '{"name": "weather", "argum', []),
        ("<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", []),
        ("[" * 5000, "[" * 5000, []),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 10000])
def test_calls_are_found_whole_and_in_pieces(text, content, names, size):
    found, calls = find_calls(text, CHOICE)
    assert (found, [call.name for call in calls]) == (content, names)
    if names[:1] == ["weather"]:
        assert json.loads(calls[0].arguments) == {"city": "Oslo"}
    held = HeldText(CHOICE)
    if size == 1 and len(text) > 1000:
        return
    sent = "".join(held.add(text[at : at + size]) for at in range(0, len(text), size))
    rest, streamed = held.finish()
    assert (sent + rest).rstrip() == content.rstrip()
    assert [call.name for call in streamed] == names


def test_text_is_not_held_longer_than_needed():
    held = HeldText(CHOICE)
    assert held.add("Hello ") == "Hello "
    assert held.add("world <tool") == "world "
    assert held.add("box") == "<toolbox"


def test_a_named_function_and_required_calls_constrain_the_text():
    named = read_choice([WEATHER, TIME], {"type": "function", "function": {"name": "weather"}})
    assert named.constraint() == {"json": WEATHER["function"]["parameters"]}
    assert find_calls('{"city": "Oslo"}', named)[1][0].name == "weather"
    required = read_choice([WEATHER, TIME], "required").constraint()
    assert required is not None
    assert len(required["json"]["items"]["anyOf"]) == 2
    assert CHOICE.constraint() is None
    assert not read_choice([WEATHER], "none").is_on


def test_only_the_first_call_is_kept_where_one_is_allowed():
    text = f'<tool_call>{CALL}</tool_call><tool_call>{{"name": "time"}}</tool_call>'
    for parallel, names in ((True, ["weather", "time"]), (False, ["weather"])):
        choice = read_choice([WEATHER, TIME], None, parallel=parallel)
        assert [call.name for call in find_calls(text, choice)[1]] == names
        held = HeldText(choice)
        held.add(text)
        assert [call.name for call in held.finish()[1]] == names
    constraint = read_choice([WEATHER, TIME], "required", parallel=False).constraint()
    assert constraint is not None
    assert constraint["json"]["maxItems"] == 1


def test_a_choice_that_fits_no_tool_is_refused():
    with pytest.raises(APIError, match="must be auto, none, required or name one of"):
        read_choice([WEATHER], {"type": "function", "function": {"name": "wether"}})


def test_messages_become_what_templates_take():
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = for_template(
        [
            {"role": "developer", "content": "be brief"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "cold"}]},
        ]
    )
    assert messages[0] == {"role": "system", "content": "be brief"}
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    assert messages[1]["content"] == ""
    assert messages[2]["content"] == "cold"
    bad = {"function": {"name": "weather", "arguments": "{"}}
    with pytest.raises(APIError, match="arguments is not JSON"):
        for_template([{"role": "assistant", "tool_calls": [bad]}])


def test_tools_reach_the_template(model, serving):
    """The template sees the tools."""
    template = (
        "{% if tools %}{{ tools[0].function.name }} {% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with serving(model) as server, server.client() as client:
        server.service.chat_template = template
        body = {"messages": [{"role": "user", "content": "x"}], "tools": [WEATHER]}
        ids = client.post("/tokenize", json=body).json()["tokens"]
        assert client.post("/detokenize", json={"tokens": ids}).json()["prompt"] == "weather x"
        answer = client.post("/v1/chat/completions", json={**body, "max_tokens": 4, "temperature": 0}).json()
        assert answer["choices"][0]["message"]["role"] == "assistant"
