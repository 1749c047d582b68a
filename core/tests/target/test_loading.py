from __future__ import annotations

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.config import EngineConfig
from specdec.errors import ConfigError, ModelLoadError, UnsupportedModelError
from specdec.target.loading import choose_device, load_config, load_model, own_linears
from specdec.target.model import load_target
from specdec.testing import tiny_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("models") / "llama", tie_word_embeddings=False)


@pytest.fixture
def path(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "model")


def load(path, dtype="auto"):
    return load_model("m", path, load_config("m", path), dtype=dtype, device=torch.device("cpu"))


def edit_config(path, **changes):
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_auto_is_the_checkpoints_dtype(path, dtype):
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(path / "model.safetensors").items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    edit_config(path, dtype=str(dtype).removeprefix("torch."))
    assert load(path).dtype == dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_asked_for(path, dtype):
    model = load(path, dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_other_dtypes_of_checkpoints_are_refused(path):
    edit_config(path, dtype="float64")
    with pytest.raises(ModelLoadError, match=r"its weights are torch.float64; set dtype to one of float32"):
        load(path)


@pytest.mark.parametrize("fuse", [True, False])
def test_weights_do_not_stay_in_the_files(path, fuse):
    """Files mapped into memory would stay resident beside fused copies, and change under a running engine."""
    target = load_target(EngineConfig(model=str(path), dtype="float32", device="cpu", fuse=fuse))
    weight = target.model.lm_head.weight.clone()
    with open("/proc/self/maps") as maps:
        assert str(path) not in maps.read()
    (path / "model.safetensors").write_bytes(bytes((path / "model.safetensors").stat().st_size))
    assert torch.equal(target.model.lm_head.weight, weight)


def test_weights_of_linears_are_copied_only_when_they_stay(path):
    model = load(path)
    with open("/proc/self/maps") as maps:
        assert str(path) in maps.read()
    table = model.model.embed_tokens.weight.data_ptr()
    own_linears(model)
    with open("/proc/self/maps") as maps:
        assert str(path) not in maps.read()
    assert model.model.embed_tokens.weight.data_ptr() == table


def test_tied_weights_stay_tied(tmp_path):
    model = load(tiny_model("llama", tmp_path / "tied", tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("kept", [0, 5, 100, 0.5, 0.99])
def test_truncated_safetensors(path, kept):
    file = path / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * kept) if isinstance(kept, float) else kept])
    with pytest.raises(
        ModelLoadError, match=r"model.safetensors: (truncated: the file has|not a readable safetensors)"
    ):
        load(path)


def test_garbage_in_place_of_safetensors(path):
    (path / "model.safetensors").write_bytes(b"<html>Not found</html>")
    with pytest.raises(ModelLoadError, match=r"model.safetensors: not a readable safetensors file \(22 bytes\)"):
        load(path)


def test_no_weights(path):
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"holds no weights \(looked for"):
        load(path)


def test_missing_shard(path):
    index = {"weight_map": {"lm_head.weight": "model.safetensors", "x": "model-00002-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"files named in .* are missing: model-00002-of-00002.safetensors"):
        load(path)


@pytest.mark.parametrize("text", ["not json", "{}", '{"weight_map": 3}', "[]"])
def test_unreadable_index(path, text):
    (path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"index.json: not a readable index"):
        load(path)


def test_missing_and_surplus_tensors(path, caplog):
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2, 2)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.WARNING):
        load(path)
    assert "1 tensors are not part of the model and were left out: model.layers.7.mlp.up_proj.weight" in caplog.text
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["lm_head.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelLoadError, match=r"2 tensors are missing: lm_head.weight, model.layers.1.mlp.up_proj.weight"
    ):
        load(path)


def test_other_shapes_than_the_configuration_says(path):
    edit_config(path, intermediate_size=100)
    wrong = (
        r"6 tensors have another shape than config.json says: "
        r"model.layers.0.mlp.down_proj.weight \[64, 96\] instead of"
    )
    with pytest.raises(ModelLoadError, match=wrong):
        load(path)


@pytest.mark.parametrize("text", ["", "{", '{"model_type": "llama", "vocab_size": "many"}', "[1]"])
def test_unreadable_configuration(path, text):
    (path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config.json: (cannot be read as JSON|not a valid configuration)"):
        load_config("m", path)


def test_unknown_architecture(path):
    edit_config(path, model_type="llama99")
    with pytest.raises(
        UnsupportedModelError, match=r"'m' \(model_type 'llama99'\).*\n.*transformers does not know"
    ) as error:
        load_config("m", path)
    assert len(error.value.reasons) == 1


def test_code_in_checkpoints_is_not_run_unless_trusted(path):
    edit_config(path, model_type="mine", auto_map={"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"})
    (path / "mine.py").write_text("raise SystemExit('ran')")
    with pytest.raises(UnsupportedModelError, match=r"set trust_remote_code = true if you trust where it comes from"):
        load_config("m", path)


@pytest.mark.parametrize("architecture", ["t5", "vit"])
def test_models_without_a_causal_language_model(architecture, tmp_path):
    from transformers import AutoConfig

    AutoConfig.for_model(architecture).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"no causal language model for this configuration"):
        load(tmp_path)


def test_refused_before_weights_are_read(tmp_path):
    """Every reason at once, and no need to fetch or read gigabytes first."""
    from transformers import AutoConfig

    AutoConfig.for_model("rwkv").save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError) as error:
        load(tmp_path)
    assert len(error.value.reasons) == 2
    assert "recurrent layers" in error.value.reasons[0]
    assert "transformers' attention interface" in error.value.reasons[1]


@pytest.mark.parametrize("device", ["tpu9", "cuda:99", "meta!"])
def test_devices_that_are_not_there(device):
    with pytest.raises(ConfigError, match=rf"device: '{device}' cannot be used here .*use 'auto', 'cpu'") as error:
        choose_device(device)
    assert error.value.path == "device"


def test_device_auto():
    assert choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert choose_device("cpu") == torch.device("cpu")
