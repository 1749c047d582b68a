"""``/v1/completions`` and ``/v1/chat/completions``: what is answered, streamed and not."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

PROMPT = "the quick brown fox jumps over the lazy dog and runs through the forest the quick brown"
GREEDY = {"model": "tiny", "temperature": 0, "max_tokens": 24, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "the quick brown fox"}]


def post(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def events(client: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def test_a_completion_is_the_engines(client, running):
    answer = post(client, "/v1/completions", prompt=PROMPT, **GREEDY)
    ids = running.llm.tokenise(PROMPT)
    again = post(client, "/v1/completions", prompt=ids, **GREEDY)
    assert answer["choices"][0]["text"] == again["choices"][0]["text"]
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert answer["choices"][0]["finish_reason"] == "length"
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), 24)
    assert usage["total_tokens"] == len(ids) + 24


@pytest.mark.parametrize("speculation", [None, False, {"num_speculative_tokens": 2}])
def test_streamed_and_whole_text_and_logprobs_are_equal(client, speculation):
    body = {**GREEDY, "prompt": PROMPT, "logprobs": 3, "return_token_ids": True, "return_token_origins": True}
    if speculation is not None:
        body["speculation"] = speculation
    whole = post(client, "/v1/completions", **body)["choices"][0]
    chunks = events(client, "/v1/completions", **body)
    parts = [chunk["choices"][0] for chunk in chunks]
    assert "".join(part["text"] for part in parts) == whole["text"]
    for key in ("tokens", "token_logprobs", "top_logprobs"):
        joined = [item for part in parts if part["logprobs"] for item in part["logprobs"][key]]
        expected = whole["logprobs"][key]
        assert len(joined) == 24
        assert joined == pytest.approx(expected, abs=1e-4) if key == "token_logprobs" else len(joined) == len(expected)
        if key == "tokens":
            assert joined == expected
    assert [t for part in parts for t in part["token_ids"]] == whole["token_ids"]
    assert len(whole["token_origins"]) == 24
    assert parts[-1]["finish_reason"] == "length"
    assert all(part["finish_reason"] is None for part in parts[:-1])
    if speculation is False:
        assert set(whole["token_origins"]) == {-1}


def test_stream_usage_comes_last_and_counts_what_was_sent(client):
    body = {**GREEDY, "prompt": PROMPT, "stream_options": {"include_usage": True}, "return_token_ids": True}
    chunks = events(client, "/v1/completions", **body)
    assert chunks[-1]["choices"] == []
    sent = sum(len(chunk["choices"][0]["token_ids"]) for chunk in chunks[:-1])
    assert chunks[-1]["usage"]["completion_tokens"] == sent == 24
    assert not any("usage" in chunk for chunk in chunks[:-1])


def test_several_prompts_and_choices_have_an_index_each(client):
    body = {"model": "tiny", "temperature": 1, "seed": 5, "max_tokens": 6, "n": 2, "ignore_eos": True}
    prompts = ["the quick", "a draft model"]
    answer = post(client, "/v1/completions", prompt=prompts, **body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["completion_tokens"] == 24
    texts = ["", "", "", ""]
    for chunk in events(client, "/v1/completions", prompt=prompts, **body):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in answer["choices"]]
    assert len(set(texts)) == 4


def test_echo_gives_the_prompt_and_its_logprobs(client):
    body = {**GREEDY, "max_tokens": 0, "prompt": "the quick brown fox", "echo": True, "logprobs": 2}
    answer = post(client, "/v1/completions", **body)
    choice = answer["choices"][0]
    assert choice["text"] == "the quick brown fox"
    assert "".join(choice["logprobs"]["tokens"]) == "the quick brown fox"
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(value < 0 for value in choice["logprobs"]["token_logprobs"][1:])
    offsets = choice["logprobs"]["text_offset"]
    tokens = choice["logprobs"]["tokens"]
    assert all("the quick brown fox"[at:].startswith(token) for at, token in zip(offsets, tokens, strict=True))
    assert answer["usage"]["completion_tokens"] == 0


def test_the_same_seed_gives_the_same_text_and_another_one_another(client):
    body = {"model": "tiny", "prompt": PROMPT, "temperature": 1.0, "max_tokens": 16}
    texts = [post(client, "/v1/completions", seed=seed, **body)["choices"][0]["text"] for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]


def test_stop_strings_end_text_and_tokens(client):
    whole = post(client, "/v1/completions", prompt=PROMPT, **GREEDY)["choices"][0]["text"]
    stop = whole[8:11]
    answer = post(client, "/v1/completions", prompt=PROMPT, stop=[stop], **GREEDY)
    choice = answer["choices"][0]
    assert choice["text"] == whole[: whole.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert answer["usage"]["completion_tokens"] < 24
    streamed = events(client, "/v1/completions", prompt=PROMPT, stop=[stop], **GREEDY)
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == choice["text"]


def test_logit_bias_and_vllms_extras_reach_the_engine(client, running):
    token = running.llm.tokenise("fox")[0]
    answer = post(
        client, "/v1/completions", prompt=PROMPT, logit_bias={str(token): 100}, return_token_ids=True, **GREEDY
    )
    assert set(answer["choices"][0]["token_ids"]) == {token}
    body = {
        **GREEDY,
        "temperature": 1,
        "prompt": PROMPT,
        "top_k": 1,
        "seed": 3,
        "min_p": 0.1,
        "repetition_penalty": 1.0,
    }
    greedy = post(client, "/v1/completions", prompt=PROMPT, **GREEDY)
    assert post(client, "/v1/completions", **body)["choices"][0]["text"] == greedy["choices"][0]["text"]
    penalised = post(client, "/v1/completions", prompt=PROMPT, frequency_penalty=2.0, presence_penalty=2.0, **GREEDY)
    assert penalised["choices"][0]["text"] != greedy["choices"][0]["text"]


def test_spec_stats_on_demand(client):
    body = {**GREEDY, "prompt": PROMPT, "max_tokens": 60}
    assert "spec_stats" not in post(client, "/v1/completions", **body)
    stats = post(client, "/v1/completions", return_spec_stats=True, **body)["spec_stats"]
    assert stats["num_draft_tokens"] >= stats["num_accepted_tokens"] >= 0
    assert sum(stats["num_accepted_tokens_per_pos"]) == stats["num_accepted_tokens"]
    assert stats["num_drafts"] > 0
    assert stats["lossless"] is True
    streamed = events(client, "/v1/completions", return_spec_stats=True, **body)[-1]
    assert streamed["spec_stats"]["num_drafts"] > 0
    off = post(client, "/v1/completions", return_spec_stats=True, speculation="off", **body)["spec_stats"]
    assert off["num_drafts"] == 0


def test_chat_goes_through_the_template(client, running):
    answer = post(client, "/v1/chat/completions", messages=MESSAGES, **GREEDY)
    ids = running.llm.tokenise_chat(MESSAGES)
    plain = post(client, "/v1/completions", prompt=ids, **GREEDY)
    choice = answer["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == plain["choices"][0]["text"]
    assert answer["object"] == "chat.completion"
    parts = [{"type": "text", "text": "the quick brown fox"}]
    again = post(client, "/v1/chat/completions", messages=[{"role": "user", "content": parts}], **GREEDY)
    assert again["choices"][0]["message"]["content"] == choice["message"]["content"]


def test_chat_without_max_tokens_goes_to_the_models_limit(client, running):
    body = {"messages": MESSAGES, "temperature": 0, "ignore_eos": True, "stop_token_ids": []}
    usage = post(client, "/v1/chat/completions", **body)["usage"]
    assert usage["total_tokens"] == running.llm.max_model_len


def test_responses_without_max_output_tokens_go_to_the_models_limit(client, running):
    answers = [post(client, "/v1/responses", input="x", temperature=1.5, seed=seed) for seed in range(8)]
    lengths = [answer["usage"]["total_tokens"] for answer in answers if answer["status"] == "incomplete"]
    assert set(lengths) == {running.llm.max_model_len}  # the others ended by themselves


def test_streamed_chat_equals_the_whole(client):
    body = {**GREEDY, "messages": MESSAGES, "logprobs": True, "top_logprobs": 3}
    whole = post(client, "/v1/chat/completions", **body)["choices"][0]
    chunks = events(client, "/v1/chat/completions", stream_options={"include_usage": True}, **body)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert "".join(delta["delta"].get("content", "") for delta in deltas) == whole["message"]["content"]
    entries = [entry for delta in deltas if delta["logprobs"] for entry in delta["logprobs"]["content"]]
    expected = whole["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [entry["token"] for entry in expected]
    for entry, other in zip(entries, expected, strict=True):
        assert [top["token"] for top in entry["top_logprobs"]] == [top["token"] for top in other["top_logprobs"]]
        assert entry["top_logprobs"][0]["token"] == entry["token"]  # greedy takes the most likely one
        assert entry["logprob"] < 0
    assert bytes(b for e in entries for b in e["bytes"]).decode("utf-8", "replace") == whole["message"]["content"]
    assert chunks[-1]["usage"]["completion_tokens"] == 24


def test_responses_whole_and_streamed(client):
    body = {"model": "tiny", "input": "the quick brown fox", "temperature": 0, "max_output_tokens": 12}
    whole = post(client, "/v1/responses", **body)
    text = whole["output"][0]["content"][0]["text"]
    assert whole["object"] == "response"
    assert whole["usage"]["output_tokens"] <= 12
    with client.stream("POST", "/v1/responses", json={**body, "stream": True}) as response:
        lines = list(response.iter_lines())
    sent = [json.loads(line[6:]) for line in lines if line.startswith("data: ")]
    assert [event["sequence_number"] for event in sent] == list(range(len(sent)))
    kinds = [event["type"] for event in sent]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == f"response.{whole['status']}"
    assert "".join(event["delta"] for event in sent if event["type"] == "response.output_text.delta") == text
    assert sent[-1]["response"]["usage"] == whole["usage"]


def test_tokenize_and_detokenize(client, running):
    answer = post(client, "/tokenize", prompt="the quick brown fox")
    assert answer["tokens"] == running.llm.tokenise("the quick brown fox")
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 512
    assert post(client, "/detokenize", tokens=answer["tokens"])["prompt"] == "the quick brown fox"
    assert post(client, "/tokenize", messages=MESSAGES)["tokens"] == running.llm.tokenise_chat(MESSAGES)
