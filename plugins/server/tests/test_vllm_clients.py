"""What clients of vLLM and OpenAI's own client send has its effect here, or is refused with what to do instead."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from tokenizers.processors import TemplateProcessing

from specdec_server.config import ServerConfig
from specdec_server.serve import announce, listen

PROMPT = "the quick brown fox jumps over the lazy dog and runs through the forest the quick brown"
MESSAGES = [{"role": "user", "content": "the quick brown fox"}]
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
TOOL = {"type": "function", "function": {"name": "set", "parameters": {"type": "object", "properties": {}}}}


def post(client: httpx.Client, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def events(client: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]
    return [json.loads(line[6:]) for line in lines]


def test_null_asks_for_nothing(client):
    """Whatever the field: clients write out the fields that they leave alone."""
    body = {**GREEDY, "best_of": None, "functions": None, "guided_json": None, "anything": None}
    assert post(client, "/v1/completions", prompt=PROMPT, **body)["choices"][0]["text"]
    options = {"include_usage": None, "include_obfuscation": False}
    assert events(client, "/v1/chat/completions", messages=MESSAGES, stream_options=options, audio=None, **GREEDY)
    assert post(client, "/v1/completions", 400, prompt=None, **GREEDY)["error"]["code"] == "missing_field"


@pytest.mark.parametrize(
    "field",
    [
        {"use_beam_search": False, "length_penalty": 1.0},
        {"prompt_cache_key": "a", "prompt_cache_retention": "24h", "session_id": "b", "user": "c"},
        {"include_reasoning": True},
        {"structured_outputs": {"choice": ["fox"], "json": None, "disable_additional_properties": False}},
    ],
)
def test_fields_that_ask_for_nothing_are_taken(client, field):
    post(client, "/v1/completions", prompt=PROMPT, **{**GREEDY, **field})


def test_fields_of_conversations_that_ask_for_nothing_are_taken(client):
    fields = {"modalities": ["text"], "logprobs": False, "top_logprobs": 0, "echo": False, "tools": []}
    post(client, "/v1/chat/completions", messages=MESSAGES, **GREEDY, **fields)
    fields = {"background": False, "include": [], "max_tool_calls": 3, "text": {"verbosity": "medium"}}
    post(client, "/v1/responses", input="x", max_output_tokens=2, **fields, reasoning={"summary": "auto"})


@pytest.mark.parametrize(
    ("path", "field", "told"),
    [
        ("/v1/completions", {"guided_choice": ["a"]}, "Send structured_outputs"),
        ("/v1/completions", {"cache_salt": "a"}, "--no-enable-prefix-caching"),
        ("/v1/completions", {"use_beam_search": True}, "use_beam_search"),
        ("/v1/completions", {"truncation_side": "left"}, "truncation_side needs truncate_prompt_tokens"),
        ("/v1/completions", {"stream_options": {"include_usage": True}}, "stream_options needs stream: true"),
        ("/v1/completions", {"request_id": "x" * 300}, "the request id has 300 characters"),
        ("/v1/chat/completions", {"functions": []}, "Send tools, and tool_choice"),
        ("/v1/chat/completions", {"chat_template": "x"}, "--chat-template"),
        ("/v1/chat/completions", {"chat_template_kwargs": {"chat_template": "x"}}, "cannot set chat_template"),
        ("/v1/chat/completions", {"include_reasoning": False}, "include_reasoning"),
        ("/v1/chat/completions", {"reasoning_effort": "low"}, "has no place for it"),
        ("/v1/responses", {"previous_response_id": "resp_1"}, "send the whole conversation in input"),
        ("/v1/responses", {"background": True}, "background"),
        ("/v1/responses", {"top_logprobs": 2}, "top_logprobs needs include"),
        ("/v1/responses", {"reasoning": {"effort": "low"}}, "has no place for it"),
    ],
)
def test_what_has_no_effect_here_is_refused_with_what_to_do(client, path, field, told):
    subject = {"/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}}.get(path, {"messages": MESSAGES})
    assert told in post(client, path, 400, **subject, **field)["error"]["message"]


@pytest.mark.parametrize(("side", "kept"), [(None, [-4, None]), ("left", [-4, None]), ("right", [0, 4])])
def test_long_prompts_are_cut_where_asked(client, running, side, kept):
    body = {**GREEDY, "truncate_prompt_tokens": 4, "return_token_ids": True}
    if side is not None:
        body["truncation_side"] = side
    ids = running.llm.tokenise(PROMPT)
    choice = post(client, "/v1/completions", prompt=PROMPT, echo=True, **body)["choices"][0]
    assert choice["prompt_token_ids"] == ids[slice(*kept)]
    echoed = running.llm.get_tokenizer().decode(ids[slice(*kept)])
    assert choice["text"].startswith(echoed)
    chat = running.llm.tokenise_chat(MESSAGES)
    answer = post(client, "/v1/chat/completions", messages=MESSAGES, **body)
    assert answer["prompt_token_ids"] == chat[slice(*kept)]


def test_a_prompt_is_cut_to_what_leaves_room_for_the_answer(client, running):
    limit = running.llm.max_model_len
    ids = [5] * limit + [6, 7]
    body = {**GREEDY, "truncate_prompt_tokens": -1, "return_token_ids": True}
    answer = post(client, "/v1/completions", prompt=ids, **body)
    assert answer["choices"][0]["prompt_token_ids"] == ids[-(limit - 6) :]
    assert answer["usage"]["completion_tokens"] == 6
    short = post(client, "/v1/completions", prompt=[5, 6], **body)
    assert short["choices"][0]["prompt_token_ids"] == [5, 6]


def test_special_tokens_are_the_tokenizers_or_none(client, running, monkeypatch):
    """The tiny model's tokenizer adds none, so it is taught to."""
    plain = running.llm.tokenise(PROMPT)
    chat = running.llm.tokenise_chat(MESSAGES)
    tokenizer = running.llm.get_tokenizer()
    start = tokenizer.convert_ids_to_tokens(1)
    adding = TemplateProcessing(single=f"{start} $A", special_tokens=[(start, 1)])
    monkeypatch.setattr(tokenizer.backend_tokenizer, "post_processor", adding)
    for given, begins in ((None, [1]), (True, [1]), (False, [])):
        body = {**GREEDY, "return_token_ids": True, "add_special_tokens": given}
        choice = post(client, "/v1/completions", prompt=PROMPT, **body)["choices"][0]
        assert choice["prompt_token_ids"] == begins + plain
        assert post(client, "/tokenize", prompt=PROMPT, add_special_tokens=given)["tokens"] == begins + plain
    for given, begins in ((None, []), (True, [1]), (False, [])):
        body = {**GREEDY, "return_token_ids": True, "add_special_tokens": given}
        assert post(client, "/v1/chat/completions", messages=MESSAGES, **body)["prompt_token_ids"] == begins + chat
        assert post(client, "/tokenize", messages=MESSAGES, add_special_tokens=given)["tokens"] == begins + chat


@pytest.mark.parametrize(
    ("path", "prefix", "body"),
    [
        ("/v1/completions", "cmpl", {"prompt": ["the", "a"], "max_tokens": 2}),
        ("/v1/chat/completions", "chatcmpl", {"messages": MESSAGES, "max_tokens": 2}),
        ("/v1/responses", "resp", {"input": "the", "max_output_tokens": 2}),
    ],
)
def test_the_clients_id_is_in_the_answers(client, path, prefix, body):
    """Also twice: the engine has names of its own. The header comes first."""
    for _ in range(2):
        assert post(client, path, **body, request_id="abc")["id"] == f"{prefix}-abc"
    both = client.post(path, json={**body, "request_id": "abc"}, headers={"X-Request-Id": "head"})
    assert both.json()["id"] == f"{prefix}-head"
    assert post(client, path, **body)["id"] != post(client, path, **body)["id"]


def test_tokens_are_named_by_id_on_request(client):
    body = {**GREEDY, "return_token_ids": True, "return_tokens_as_token_ids": True}
    choice = post(client, "/v1/completions", prompt=PROMPT, logprobs=2, echo=True, **body)["choices"][0]
    made = [*choice["prompt_token_ids"], *choice["token_ids"]]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in made]
    assert all(name.startswith("token_id:") for table in choice["logprobs"]["top_logprobs"][1:] for name in table)
    by_text = post(client, "/v1/completions", prompt=PROMPT, logprobs=2, echo=True, **GREEDY)["choices"][0]
    assert choice["logprobs"]["text_offset"] == by_text["logprobs"]["text_offset"]
    chat = post(client, "/v1/chat/completions", messages=MESSAGES, logprobs=True, top_logprobs=2, **body)["choices"][0]
    entries = chat["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{token_id}" for token_id in chat["token_ids"]]
    assert all(top["token"].startswith("token_id:") for entry in entries for top in entry["top_logprobs"])
    assert (
        bytes(b for entry in entries for b in entry["bytes"]).decode("utf-8", "replace") == chat["message"]["content"]
    )


def test_the_tokens_of_the_prompt_are_streamed_once(client, running):
    ids = running.llm.tokenise(PROMPT)
    body = {**GREEDY, "max_tokens": 200, "return_token_ids": True}  # a busy machine may put many into one part
    parts = [event["choices"][0] for event in events(client, "/v1/completions", prompt=PROMPT, **body)]
    assert len(parts) > 1
    assert [part.get("prompt_token_ids") for part in parts] == [ids] + [None] * (len(parts) - 1)
    chunks = events(client, "/v1/chat/completions", messages=MESSAGES, **{**body, "temperature": 1, "n": 2})
    told = [chunk.get("prompt_token_ids") for chunk in chunks]
    assert told == [running.llm.tokenise_chat(MESSAGES)] + [None] * (len(chunks) - 1)


def test_echo_begins_with_the_message_that_is_continued(client):
    messages = [*MESSAGES, {"role": "assistant", "content": "jumps over"}]
    body = {**GREEDY, "messages": messages, "continue_final_message": True}
    new = post(client, "/v1/chat/completions", **body)["choices"][0]["message"]["content"]
    whole = post(client, "/v1/chat/completions", **body, echo=True)["choices"][0]["message"]["content"]
    assert whole == "jumps over" + new
    streamed = events(client, "/v1/chat/completions", **body, echo=True)
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in streamed) == whole
    other = post(client, "/v1/chat/completions", messages=MESSAGES, echo=True, **GREEDY)["choices"][0]["message"]
    plain = post(client, "/v1/chat/completions", messages=MESSAGES, **GREEDY)["choices"][0]["message"]
    assert other == plain  # the last message is the user's


@pytest.mark.parametrize("message", [{"role": "assistant"}, {"role": "assistant", "content": None}])
def test_an_assistant_may_have_said_nothing(client, message):
    empty = post(client, "/tokenize", messages=[*MESSAGES, {"role": "assistant", "content": ""}, *MESSAGES])
    assert post(client, "/tokenize", messages=[*MESSAGES, message, *MESSAGES])["tokens"] == empty["tokens"]


def test_parts_of_a_message_are_lines(client):
    parts = [{"type": "text", "text": "the quick"}, {"type": "text", "text": "brown fox"}]
    lines = post(client, "/tokenize", messages=[{"role": "user", "content": "the quick\nbrown fox"}])
    assert post(client, "/tokenize", messages=[{"role": "user", "content": parts}])["tokens"] == lines["tokens"]


@pytest.mark.parametrize("name", ["reasoning_effort", "enable_thinking"])
def test_an_effort_reaches_a_template_that_has_a_place_for_it(client, running, monkeypatch, name):
    template = f"{{{{ {name} }}}} {{% for m in messages %}}{{{{ m.content }}}}{{% endfor %}}"
    monkeypatch.setattr(running.service, "chat_template", template)
    body = {"messages": MESSAGES, "return_token_ids": True, **GREEDY}

    def prompt(**fields: Any) -> str:
        ids = post(client, "/v1/chat/completions", **body, **fields)["prompt_token_ids"]
        return str(running.llm.get_tokenizer().decode(ids))

    expected = {"reasoning_effort": ("low", "none"), "enable_thinking": ("True", "False")}[name]
    for effort, begins in zip(("low", "none"), expected, strict=True):
        with_effort = prompt(reasoning_effort=effort)
        assert with_effort == prompt(chat_template_kwargs={name: begins})
        assert with_effort != prompt()
    own = {name: "own"}
    assert prompt(reasoning_effort="low", chat_template_kwargs=own) == prompt(chat_template_kwargs=own)


def test_vllms_name_for_the_arguments_of_logits_processors(client):
    for name in ("extra_args", "vllm_xargs"):
        message = post(client, "/v1/completions", 400, prompt="x", **{name: {"budget": 1}})["error"]["message"]
        assert message.startswith("extra_args has budget, but this engine has no logits processors")


def test_structural_tags_as_a_response_format(client):
    pytest.importorskip("specdec_grammar_xgrammar")
    wanted = {"type": "structural_tag", "format": {"type": "const_string", "value": "the fox"}}
    answer = post(client, "/v1/chat/completions", messages=MESSAGES, response_format=wanted, max_tokens=20)
    assert answer["choices"][0]["message"]["content"] == "the fox"


def test_one_call_at_a_time(client, running):
    """``parallel_tool_calls: false`` is kept by the grammar, and where calls are only found."""
    pytest.importorskip("specdec_grammar_xgrammar")
    tokenizer = running.llm.get_tokenizer()
    texts = [tokenizer.decode([token]) for token in range(len(tokenizer))]
    bias = {str(token): -100 for token, text in enumerate(texts) if any(map(str.isspace, text))}
    comma = {str(token): 100 for token, text in enumerate(texts) if text == ","}  # as many calls as are allowed
    body = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "max_tokens": 120, "seed": 1}
    body |= {"logit_bias": {**bias, **comma}, "parallel_tool_calls": False}
    choice = post(client, "/v1/chat/completions", **body)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert len(choice["message"]["tool_calls"]) == 1


def test_browsers_may_send_any_header(model, serving):
    """OpenAI's client in a browser sends ``x-stainless-…``."""
    with serving(model, {"allowed_origins": ("*",)}) as server, server.client() as client:
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-stainless-lang"}
        answer = client.options("/v1/completions", headers={"Origin": "https://a.example", **asked})
        assert answer.status_code == 200
        assert "x-stainless-lang" in answer.headers["access-control-allow-headers"]


def test_a_key_for_vllm_alone_leaves_no_server_open_in_silence(running, monkeypatch, caplog):
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    for keys, warned in (((), True), (("key",), False)):
        caplog.clear()
        monkeypatch.setattr(running.service, "config", ServerConfig(api_key=keys, port=0))
        with listen(ServerConfig(port=0)) as listening:
            announce(running.service, listening)
        assert ("VLLM_API_KEY is not read here" in caplog.text) == warned


# --- the responses API ---------------------------------------------------------------------------


def test_a_response_says_what_was_in_effect(client):
    answer = post(client, "/v1/responses", input="x", max_output_tokens=2, parallel_tool_calls=False, store=True)
    assert (answer["temperature"], answer["top_p"], answer["top_logprobs"]) == (1.0, 1.0, 0)
    assert (answer["parallel_tool_calls"], answer["store"], answer["background"]) == (False, False, False)
    assert answer["text"] == {"format": {"type": "text"}}
    assert answer["previous_response_id"] is None
    answer = post(client, "/v1/responses", input="x", max_output_tokens=2, temperature=0, top_p=0.5)
    assert (answer["temperature"], answer["top_p"]) == (0.0, 0.5)


def test_responses_take_vllms_fields(client, running):
    fox = running.llm.tokenise("fox")[0]
    word = running.llm.get_tokenizer().decode([fox])
    body = {"input": "the quick", "max_output_tokens": 4, "temperature": 0, "ignore_eos": True}
    text = post(client, "/v1/responses", **body, logit_bias={str(fox): 100})["output"][0]["content"][0]["text"]
    assert set(running.llm.tokenise(text)) == {fox}
    answer = post(client, "/v1/responses", **body, allowed_token_ids=[fox], stop=[word], min_tokens=2)
    assert answer["usage"]["output_tokens"] == 3
    assert answer["status"] == "completed"


def test_responses_give_logprobs_whole_and_streamed(client):
    body = {"input": "the quick", "max_output_tokens": 5, "temperature": 0, "top_logprobs": 2}
    body |= {"include": ["message.output_text.logprobs"], "ignore_eos": True}
    part = post(client, "/v1/responses", **body)["output"][0]["content"][0]
    assert len(part["logprobs"]) == 5
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"]
    sent = events(client, "/v1/responses", **body)
    deltas = [event for event in sent if event["type"] == "response.output_text.delta"]
    assert [entry["token"] for event in deltas for entry in event["logprobs"]] == [e["token"] for e in part["logprobs"]]
    done = next(event for event in sent if event["type"] == "response.output_text.done")
    assert [entry["token"] for entry in done["logprobs"]] == [entry["token"] for entry in part["logprobs"]]
    without = post(client, "/v1/responses", **{**body, "include": [], "top_logprobs": 0})
    assert without["output"][0]["content"][0]["logprobs"] == []


def test_calls_are_streamed_as_openai_does(client):
    """An item without arguments, then the arguments: clients join the deltas."""
    pytest.importorskip("specdec_grammar_xgrammar")
    tool = {"type": "function", "name": "set", "parameters": {"const": 7}}
    body = {"input": "x", "tools": [tool], "tool_choice": {"type": "function", "name": "set"}, "max_output_tokens": 20}
    sent = events(client, "/v1/responses", **body)
    kinds = [event["type"].removeprefix("response.") for event in sent]
    about = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds == ["created", "in_progress", *about, "completed"]
    added, delta, done, item = sent[2:6]
    assert (added["item"]["arguments"], added["item"]["status"]) == ("", "in_progress")
    assert delta["delta"] == done["arguments"] == item["item"]["arguments"] == "7"
    assert sent[-1]["response"]["output"][0]["arguments"] == "7"
