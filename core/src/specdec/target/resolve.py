"""From the model name a user gives to files on this machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from attrs import frozen

from specdec.errors import ModelNotFoundError
from specdec.target.cache import cache_root
from specdec.target.demo import DEMO_PREFIX, demo_file, demo_head
from specdec.wording import reason_of

if TYPE_CHECKING:
    from collections.abc import Sequence

GGUF_MAGIC = b"GGUF"

HUB_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
"""What is fetched from a hub repository besides weights."""

HUB_TIMEOUT = 10.0
"""Seconds to wait for the hub to answer before the local copy is taken or the start fails."""


@frozen
class ResolvedModel:
    """A model found on this machine."""

    name: str
    """As the user named it."""
    path: Path
    kind: Literal["directory", "gguf"]


def resolve_model(
    name: str, cache_dir: str | None = None, *, trust_remote_code: bool = False, option: str = "model"
) -> ResolvedModel:
    """Find a model: ``demo:NAME``, a directory in Hugging Face's layout, a GGUF file, or an id on the Hugging Face hub.

    Args:
        name: what the user gave.
        cache_dir: specdec's cache directory, for demonstration models that come in parts.
        trust_remote_code: whether a hub repository's Python files are fetched too.
        option: dotted path of the setting that names the model, for messages.

    Raises:
        ModelNotFoundError: nothing is there under this name; the message says where was looked and what to do.
    """
    try:
        return _resolved(name, cache_dir, trust_remote_code)
    except ModelNotFoundError as error:
        raise error.moved(option) from error.__cause__


def _resolved(name: str, cache_dir: str | None, trust_remote_code: bool) -> ResolvedModel:
    if name.startswith(DEMO_PREFIX):
        head = demo_head(name)
        if head is not None:
            return ResolvedModel(name, head, "directory")
        return ResolvedModel(name, demo_file(name, cache_root(cache_dir)), "gguf")
    try:
        path = Path(name).expanduser()
        if path.is_dir():
            return ResolvedModel(name, _checked_directory(name, path), "directory")
        if path.is_file():
            return ResolvedModel(name, _checked_gguf(name, path), "gguf")
    except (OSError, RuntimeError) as error:  # no permission, a name too long, or no such home directory
        raise ModelNotFoundError(f"{name!r} cannot be read: {reason_of(error)}") from error
    if _looks_like_path(name):
        raise ModelNotFoundError(f"no file or directory {name!r} (looked at {path.absolute()})")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise ModelNotFoundError(
            f"{name!r} is no file or directory here and no hub id ('owner/name'). "
            "Give a directory with a config.json, a .gguf file, a hub id, or a demonstration model like 'demo:smollm2'"
        )
    return ResolvedModel(name, _from_hub(name, trust_remote_code), "directory")


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or name.endswith((".gguf", ".safetensors"))


def _checked_directory(name: str, path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    gguf = sorted(file.name for file in path.glob("*.gguf"))
    hint = f"; it holds GGUF files, name one of them: {', '.join(gguf)}" if gguf else ""
    raise ModelNotFoundError(f"the directory {name!r} has no config.json{hint}")


def _checked_gguf(name: str, path: Path) -> Path:
    with path.open("rb") as file:
        if file.read(4) == GGUF_MAGIC:
            return path
    if path.suffix == ".gguf":
        return path  # whoever reads it says what is wrong with it
    raise ModelNotFoundError(
        f"the file {name!r} is no GGUF file; for a Hugging Face checkpoint give its directory ({path.parent})"
    )


def _from_hub(name: str, trust_remote_code: bool) -> Path:
    """Download a hub repository, or find it in the hub's local cache when the hub does not answer."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    patterns: list[str] | None
    try:
        files = [sibling.rfilename for sibling in HfApi().model_info(name, timeout=HUB_TIMEOUT).siblings or ()]
        patterns = _wanted(files, trust_remote_code)
    except (GatedRepoError, RepositoryNotFoundError) as error:
        gated = isinstance(error, GatedRepoError)
        reason = "it is gated" if gated else "it does not exist, or it is private"
        raise ModelNotFoundError(
            f"the hub refuses {name!r}: {reason}. Log in with 'hf auth login' if you have access, or correct the name"
        ) from error
    except (OSError, HfHubHTTPError):
        patterns = None  # no answer: only what was fetched before
    except Exception as error:
        if not type(error).__module__.startswith(("httpx", "httpcore", "requests")):
            raise
        patterns = None
    try:
        return Path(
            snapshot_download(
                name, allow_patterns=patterns, local_files_only=patterns is None, etag_timeout=HUB_TIMEOUT
            )
        )
    except (LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFoundError(
            f"{name!r} is no file or directory here, the Hugging Face hub cannot be reached, and no copy of it "
            "was fetched before. Check the network (and HF_ENDPOINT, HF_HUB_OFFLINE), or give the path of a checkpoint "
            "directory or .gguf file; 'demo:smollm2' needs no hub"
        ) from error


def _wanted(files: Sequence[str], trust_remote_code: bool) -> list[str]:
    """Weights as safetensors if there are any (pickles only when not), and the small files."""
    weights = ["*.safetensors"] if any(file.endswith(".safetensors") for file in files) else ["pytorch_model*.bin"]
    return [*HUB_FILES, *weights, *(["*.py"] if trust_remote_code else [])]
