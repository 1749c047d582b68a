"""GGUF files: converted once to a Hugging Face checkpoint directory in the cache.

Conversion goes through transformers and takes long compared with a start, and leaves memory behind that Python does not
give back, so it runs in a process of its own (``python -m specdec.target.gguf SOURCE TARGET DTYPE``), whose progress
bar is shown.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.errors import ModelLoadError
from specdec.files import save_tensors
from specdec.target.cache import creating
from specdec.target.gguf_header import read_header
from specdec.wording import reason_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

FORMAT_VERSION = 1
"""Raise it when converted directories change, so that old cache entries are not used."""

CONVERSION_FILE = "specdec_conversion.json"
"""Beside the converted checkpoint: where it came from, and why it has no tokenizer if it has none."""

_EXIT_REFUSED = 3
"""Exit code of the converting process when standard output ends with a message for the user."""


def converted(source: Path, dtype: str, cache: Path) -> Path:
    """The checkpoint directory made from a GGUF file; converts on first use.

    Args:
        source: the GGUF file.
        dtype: 'float32', 'bfloat16' or 'float16': what the weights are stored as.
        cache: specdec's cache directory.

    Raises:
        ModelLoadError: the file is truncated or unreadable, its architecture is unknown to transformers, or the
            ``gguf`` package is missing.
    """
    entry = cache / "gguf" / f"{source.stem}-{dtype}-{_identity(source)}"
    with creating(entry) as partial:
        if partial is not None:
            _require_gguf(source)
            read_header(source)
            _convert_in_process(source, partial, dtype)
    return entry


def _identity(source: Path) -> str:
    """Changes when the file does: from its path, size and time of change."""
    source = source.resolve()
    stat = source.stat()
    text = f"{FORMAT_VERSION}\0{source}\0{stat.st_size}\0{stat.st_mtime_ns}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _require_gguf(source: Path) -> None:
    import importlib.util

    if importlib.util.find_spec("gguf") is None:
        raise ModelLoadError(f"{source}: reading GGUF files needs the gguf package: pip install 'specdec-core[gguf]'")


def _convert_in_process(source: Path, target: Path, dtype: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, "-m", "specdec.target.gguf", str(source), str(target), dtype]
    result = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False
    )
    if result.returncode == _EXIT_REFUSED:
        raise ModelLoadError(result.stdout.strip().splitlines()[-1])
    if result.returncode != 0:
        raise ModelLoadError(
            f"{source}: the conversion ended with exit code {result.returncode} (see its output above)"
        )


def convert(source: Path, target: Path, dtype: str) -> None:
    """Convert a GGUF file to a new directory: config, weights as safetensors, tokenizer. Shows a progress bar.

    Raises:
        ModelLoadError: see `converted`.
    """
    header = read_header(source)
    with _Progress(f"Converting {source.name} to {dtype}, once for this dtype", header.num_tensors + 3) as advance:
        try:
            _write_checkpoint(source, target, dtype, advance)
        except ModelLoadError:
            raise
        except Exception as error:
            raise ModelLoadError(
                f"{source}: transformers cannot convert this GGUF file (architecture {header.architecture!r}): "
                f"{type(error).__name__}: {reason_of(error)}"
            ) from error


def _write_checkpoint(source: Path, target: Path, dtype: str, advance: Callable[[], None]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    advance()
    target.mkdir()
    problem = _write_tokenizer(source, target)
    advance()
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    tensors = _read_tensors(source, skeleton, getattr(torch, dtype), advance)
    config.dtype = dtype
    config.architectures = [type(skeleton).__name__]
    config.save_pretrained(target)
    save_tensors(tensors, target / "model.safetensors", {"format": "pt"})
    facts = {"source": str(source), "dtype": dtype, "version": FORMAT_VERSION, "tokenizer_problem": problem}
    (target / CONVERSION_FILE).write_text(json.dumps(facts, indent=2))
    advance()


def _write_tokenizer(source: Path, target: Path) -> str | None:
    """Save the file's tokenizer; when transformers cannot read it, say why: token ids still work."""
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
    except Exception as error:
        return f"{type(error).__name__}: {reason_of(error)}"
    return None


def _read_tensors(source: Path, skeleton: Any, dtype: Any, advance: Callable[[], None]) -> dict[str, Any]:
    """Dequantised tensors under transformers' names; the bar moves with each."""
    import transformers.modeling_gguf_pytorch_utils as reader

    def advancing(tensors: Iterable[Any], **_: Any) -> Iterator[Any]:
        for tensor in tensors:
            yield tensor
            advance()

    # The reader shows a bar of its own through this name of its module; ours takes its place meanwhile.
    own_bar, reader.tqdm = reader.tqdm, advancing
    try:
        loaded = reader.load_gguf_checkpoint(source, return_tensors=True, model_to_load=skeleton, torch_dtype=dtype)
    finally:
        reader.tqdm = own_bar
    return {name: tensor.contiguous() for name, tensor in loaded["tensors"].items()}


class _Progress:
    """A progress bar on standard error that yields a function to advance it; without a terminal one line, at once."""

    def __init__(self, title: str, total: int) -> None:
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        self._bar = Progress(console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task(title, total=total)
        if not console.is_terminal:
            console.print(title, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Callable[[], None]:
        self._bar.start()
        return lambda: self._bar.advance(self._task)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _share_repeated_work() -> None:
    """Let transformers parse the file once instead of three times, and list tensor names once instead of once a module.

    It looks both functions up in the gguf package each time; this process ends after one conversion. Parsing takes a
    slice for every string of the vocabulary, and those of a plain array cost half of those of a mapped one.
    """
    import gguf
    import gguf.gguf_reader
    import numpy as np

    class PlainArrays:
        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

        def memmap(self, path: str, mode: Any) -> Any:
            return np.memmap(path, mode=mode).view(np.ndarray)

    gguf.gguf_reader.np = PlainArrays()
    reader = functools.cache(gguf.GGUFReader)
    gguf.GGUFReader = lambda path: reader(os.fspath(path))
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)


def _main(arguments: list[str]) -> int:
    source, target, dtype = arguments
    _share_repeated_work()
    try:
        convert(Path(source), Path(target), dtype)
    except ModelLoadError as error:
        print(str(error).replace("\n", " "))
        return _EXIT_REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
