"""Files that others are to read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from specdec.files import save_tensors


@pytest.mark.parametrize(("folder", "file"), [(0o755, 0o644), (0o770, 0o660), (0o700, 0o600)])
def test_a_file_is_as_readable_as_its_folder(tmp_path: Path, folder: int, file: int) -> None:
    tmp_path.chmod(folder)
    path = tmp_path / "model.safetensors"
    for value in (0.0, 1.0):
        save_tensors({"a": torch.full((2,), value)}, path, {"format": "pt"})
        assert path.stat().st_mode & 0o777 == file
        with safe_open(path, "pt") as stored:
            assert stored.metadata() == {"format": "pt"}
            assert stored.get_tensor("a").tolist() == [value, value]
