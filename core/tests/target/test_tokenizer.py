from __future__ import annotations

from types import SimpleNamespace

import pytest
from tokenizers.processors import TemplateProcessing

from specdec.errors import InvalidRequestError, ModelLoadError, ModelNotFoundError
from specdec.target.tokenizer import apply_chat_template, eos_token_ids, load_tokenizer, names_variable
from specdec.testing import tiny_model, tiny_tokenizer

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("models") / "llama")


def test_tokenizer_of_the_checkpoint(path):
    tokenizer = load_tokenizer(path)
    assert tokenizer.decode(tokenizer("hello")["input_ids"]) == "hello"


def test_checkpoint_without_one(tmp_path, caplog):
    assert load_tokenizer(tmp_path) is None
    assert "has no tokenizer: prompts must be token ids, and outputs have no text" in caplog.text


def test_another_directory(path, tmp_path):
    assert load_tokenizer(tmp_path, str(path)) is not None


def test_another_directory_without_one(path, tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"tokenizer: .* has no tokenizer files"):
        load_tokenizer(path, str(tmp_path))


@pytest.mark.parametrize("wanted", ["/no/such/folder", "nowhere"])
def test_another_directory_that_is_not_there(path, wanted):
    """The message names the setting at fault, which is not the model."""
    with pytest.raises(ModelNotFoundError, match=rf"^tokenizer: .*{wanted}'"):
        load_tokenizer(path, wanted)


def test_a_gguf_file_is_no_tokenizer(path, tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFoundError, match=r"tokenizer: .*m.gguf' is a GGUF file"):
        load_tokenizer(path, str(tmp_path / "m.gguf"))


def test_broken_files(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ModelLoadError, match=r"its tokenizer cannot be loaded: .*Set tokenizer to another directory"):
        load_tokenizer(tmp_path)


def test_eos_of_all_sources():
    sources = [
        SimpleNamespace(eos_token_id=[7, 2]),
        SimpleNamespace(eos_token_id=2),
        SimpleNamespace(eos_token_id=0),
        None,
    ]
    assert eos_token_ids(*sources, SimpleNamespace(eos_token_id=None), SimpleNamespace()) == (0, 2, 7)


def test_conversation():
    tokenizer = tiny_tokenizer(512)
    ids = apply_chat_template(tokenizer, HELLO, model="m")
    text = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(ids) == text
    assert "hello" in text


def test_the_tokenizers_own_tokens_come_on_request():
    tokenizer = tiny_tokenizer(512)
    plain = apply_chat_template(tokenizer, HELLO, model="m")
    start = tokenizer.convert_ids_to_tokens(1)
    adding = TemplateProcessing(single=f"{start} $A", special_tokens=[(start, 1)])
    tokenizer.backend_tokenizer.post_processor = adding
    assert apply_chat_template(tokenizer, HELLO, model="m") == plain
    assert apply_chat_template(tokenizer, HELLO, model="m", add_special_tokens=True) == [1, *plain]


def test_a_variable_is_found_in_a_template_and_not_in_its_comments():
    assert names_variable("{% if tools %}x{% endif %}", "tools")
    assert not names_variable("{# tools #}{{ my_tools }}", "tools")


def test_no_tokenizer():
    with pytest.raises(InvalidRequestError, match=r"chat: the model 'm' has no tokenizer"):
        apply_chat_template(None, HELLO, model="m")


def test_no_template():
    tokenizer = tiny_tokenizer(512)
    tokenizer.chat_template = None
    with pytest.raises(InvalidRequestError, match=r"chat: the model 'm' has no chat template .*use generate"):
        apply_chat_template(tokenizer, HELLO, model="m")


@pytest.mark.parametrize("messages", [["hello"], [{"content": "x"}], [{"role": 3, "content": "x"}], [{"role": "user"}]])
def test_malformed_messages(messages):
    with pytest.raises(InvalidRequestError, match=r"chat: message 0 must be a dict with 'role' and 'content'"):
        apply_chat_template(tiny_tokenizer(512), messages, model="m")


def test_empty_conversation():
    with pytest.raises(InvalidRequestError, match=r"conversation is empty"):
        apply_chat_template(tiny_tokenizer(512), [], model="m")


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}


def test_tools_go_through_templates_that_show_them():
    tokenizer = tiny_tokenizer(512)
    assert "weather" in tokenizer.decode(apply_chat_template(tokenizer, HELLO, model="m", tools=[TOOL]))
    plain = "{# tools #}{% for m in messages %}{{ m.content }}, my_tools{% endfor %}"
    for variables in ({}, {"chat_template": plain}):
        tokenizer.chat_template = None if variables else plain
        with pytest.raises(InvalidRequestError, match=r"tools: .* of the model 'm' has no place for tools"):
            apply_chat_template(tokenizer, HELLO, model="m", tools=[TOOL], variables=variables)
        assert apply_chat_template(tokenizer, HELLO, model="m", tools=[], variables=variables)


def test_a_template_of_its_own_stands_in_for_one_that_is_not_there():
    tokenizer = tiny_tokenizer(512)
    tokenizer.chat_template = None
    variables = {"chat_template": "{{ messages[0].content }}"}
    assert tokenizer.decode(apply_chat_template(tokenizer, HELLO, model="m", variables=variables)) == "hello"


def test_messages_the_template_refuses():
    tokenizer = tiny_tokenizer(512)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InvalidRequestError, match=r"do not fit the chat template of 'm': roles must alternate"):
        apply_chat_template(tokenizer, HELLO, model="m")
