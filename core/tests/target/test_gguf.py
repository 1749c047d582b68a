from __future__ import annotations

import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specdec.errors import ModelLoadError
from specdec.target import gguf as gguf_module
from specdec.target.gguf import converted
from specdec.target.gguf_header import read_header
from specdec.target.loading import load_config
from specdec.target.tokenizer import load_tokenizer
from specdec.testing import tiny_module


def permuted(weight, heads):
    """Rows of a query or key projection in llama.cpp's order: pairs of rotary dims side by side."""
    return weight.view(heads, 2, weight.shape[0] // heads // 2, -1).transpose(1, 2).reshape(weight.shape)


def write_gguf(path, model, architecture="llama"):
    """A float32 GGUF file of a tiny llama without a tokenizer."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    parts = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    for name, tensor in model.state_dict().items():
        stem = name.removesuffix(".weight")
        if stem.startswith("model.layers."):
            index, part = stem.removeprefix("model.layers.").split(".", 1)
            names[stem] = f"blk.{index}.{parts[part]}"
        if "q_proj" in stem:
            tensor = permuted(tensor, config.num_attention_heads)
        if "k_proj" in stem:
            tensor = permuted(tensor, config.num_key_value_heads)
        writer.add_tensor(names[stem] + ".weight", np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def model():
    return tiny_module("llama", tie_word_embeddings=False, max_position_embeddings=128)


@pytest.fixture
def file(tmp_path, model):
    return write_gguf(tmp_path / "tiny.gguf", model)


@pytest.fixture
def in_this_process(monkeypatch):
    """Convert without starting another Python, which takes seconds."""
    monkeypatch.setattr(gguf_module, "_convert_in_process", gguf_module.convert)


@pytest.mark.usefixtures("in_this_process")
def test_conversion_keeps_the_weights(file, model, cache):
    path = converted(file, "float32", cache)
    tensors = load_file(path / "model.safetensors")
    expected = model.state_dict()
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected[name], atol=0, rtol=0)
    config = load_config("tiny", path)
    assert (config.model_type, config.vocab_size, config.num_key_value_heads) == ("llama", 512, 2)


@pytest.mark.usefixtures("in_this_process")
def test_dtype_of_the_converted_weights(file, cache):
    tensors = load_file(converted(file, "bfloat16", cache) / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


@pytest.mark.usefixtures("in_this_process")
def test_a_second_start_does_not_convert_again(file, cache, monkeypatch):
    first = converted(file, "float32", cache)
    monkeypatch.setattr(gguf_module, "_convert_in_process", lambda *_: pytest.fail("converted again"))
    assert converted(file, "float32", cache) == first


@pytest.mark.usefixtures("in_this_process")
def test_a_changed_file_and_another_dtype_are_converted_anew(file, model, cache):
    first = converted(file, "float32", cache)
    assert converted(file, "bfloat16", cache) != first
    model.lm_head.weight.data += 1
    write_gguf(file, model)
    again = converted(file, "float32", cache)
    assert again != first
    torch.testing.assert_close(load_file(again / "model.safetensors")["lm_head.weight"], model.lm_head.weight.data)


@pytest.mark.usefixtures("in_this_process")
def test_a_file_without_a_readable_tokenizer_serves_token_ids(file, cache, caplog):
    assert load_tokenizer(converted(file, "float32", cache)) is None
    assert "has no tokenizer (" in caplog.text
    assert "prompts must be token ids" in caplog.text


def test_conversion_runs_in_a_process_of_its_own_and_shows_progress(file, cache, capfd):
    path = converted(file, "float32", cache)
    assert sorted(entry.name for entry in path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "specdec_conversion.json",
    ]
    assert "Converting tiny.gguf to float32, once for this dtype\n" in capfd.readouterr().err
    assert not [entry for entry in path.parent.iterdir() if entry.name.endswith(".partial")]


@pytest.mark.usefixtures("in_this_process")
def test_each_dtype_is_announced_before_it_is_converted(file, cache, capfd, monkeypatch):
    """Also where standard error is no terminal, and a bar would show only when it is full."""
    said = {}

    def write(source, target, dtype, advance):
        said[dtype] = capfd.readouterr().err
        target.mkdir()

    monkeypatch.setattr(gguf_module, "_write_checkpoint", write)
    for dtype in ("bfloat16", "float32", "float32"):
        converted(file, dtype, cache)
    expected = "Converting tiny.gguf to {}, once for this dtype\n"
    assert said == {dtype: expected.format(dtype) for dtype in ("bfloat16", "float32")}
    assert capfd.readouterr().err == ""


def test_errors_of_the_converting_process_come_back_as_one_message(tmp_path, model, cache, monkeypatch, capsys):
    """The header is sound, so only transformers can say that it does not know the architecture."""
    monkeypatch.setattr(gguf_module, "_share_repeated_work", lambda: None)

    def run(command, **_):
        code = gguf_module._main(command[3:])
        return subprocess.CompletedProcess(command, code, stdout=capsys.readouterr().out)

    monkeypatch.setattr(subprocess, "run", run)
    file = write_gguf(tmp_path / "odd.gguf", model, architecture="clip")
    with pytest.raises(
        ModelLoadError, match=r"odd.gguf: transformers cannot convert this GGUF file \(architecture 'clip'\)"
    ):
        converted(file, "float32", cache)
    assert not [entry for entry in (cache / "gguf").iterdir() if not entry.name.endswith(".lock")]


def test_a_converting_process_that_dies(file, cache, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], -9, stdout=""))
    with pytest.raises(ModelLoadError, match=r"tiny.gguf: the conversion ended with exit code -9"):
        converted(file, "float32", cache)


@pytest.mark.parametrize("kept", [0, 3, 10, 300, 0.5, -1])
def test_truncated_files(file, cache, kept):
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * kept) if isinstance(kept, float) else kept])
    with pytest.raises(ModelLoadError, match=r"tiny.gguf: (truncated: the file has|not a readable GGUF file)"):
        converted(file, "float32", cache)


def test_truncation_is_told_with_sizes(file):
    whole = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelLoadError) as error:
        read_header(file)
    assert f"the file has {whole - 1:,} bytes, its tensors need {whole:,}; fetch it again" in str(error.value)


def test_a_sound_header(file, model):
    header = read_header(file)
    assert header.architecture == "llama"
    assert header.num_tensors == len(model.state_dict())
    assert header.required_bytes == file.stat().st_size


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PK\x03\x04" + bytes(100), r"it starts with b'PK\\x03\\x04', not b'GGUF'"),
        (b"GGUF" + (9).to_bytes(4, "little") + bytes(100), r"its version is 9; supported are 2, 3"),
        (b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 100, r"damaged"),
    ],
)
def test_damaged_headers(tmp_path, data, message):
    file = tmp_path / "bad.gguf"
    file.write_bytes(data)
    with pytest.raises(ModelLoadError, match=r"bad.gguf: not a readable GGUF file \(\d+ bytes\): .*" + message):
        read_header(file)


def test_the_gguf_package_is_named_when_missing(file, cache, monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r"pip install 'specdec-core\[gguf\]'"):
        converted(file, "float32", cache)


def test_listing_modules_does_not_import_torch():
    code = "import sys, specdec.target.resolve, specdec.target.gguf; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


COUNT = """
import sys
from pathlib import Path
import gguf
from specdec.target import gguf as converter

parsed = []
init = gguf.GGUFReader.__init__
gguf.GGUFReader.__init__ = lambda self, path, *more: (parsed.append(path), init(self, path, *more))[1]
converter._share_repeated_work()
converter.convert(Path(sys.argv[1]), Path(sys.argv[2]), "float32")
print(len(parsed))
"""


def test_a_conversion_parses_the_file_once(file, tmp_path, model):
    command = [sys.executable, "-c", COUNT, str(file), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1"]
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(stored["model.norm.weight"], model.state_dict()["model.norm.weight"])
