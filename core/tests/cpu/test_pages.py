"""Memory for weights and caches: zeros, each for itself, at the start of cache lines, in few mappings."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest
import torch

from specdec.cpu import pages

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(pages, "_open", [])


def test_tensors_are_zeros_that_do_not_overlap():
    shapes = [(300 * KIB,), (7, 100_003), (3 * MIB + 1,), (300 * MIB,), (300 * KIB,), (3,)]
    made = [pages.zeros(shape, torch.uint8) for shape in shapes]
    for number, tensor in enumerate(made, start=1):
        assert tensor.data_ptr() % 64 == 0
        assert not tensor.any()
        tensor.fill_(number)
    for number, (tensor, shape) in enumerate(zip(made, shapes, strict=True), start=1):
        assert tensor.shape == shape
        assert torch.all(tensor == number)


def test_dtype_and_shape():
    made = pages.zeros((2, 100, 1000), torch.float32)
    assert (made.dtype, made.shape, made.is_contiguous()) == (torch.float32, (2, 100, 1000), True)


def test_large_tensors_share_a_mapping_and_small_ones_have_their_own_memory():
    first, small, second = (pages.zeros((size,), torch.uint8) for size in (MIB, 100 * KIB, MIB))
    assert second.data_ptr() - first.data_ptr() == MIB
    assert not first.data_ptr() <= small.data_ptr() < second.data_ptr() + MIB


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_asked_for_in_huge_pages_and_goes_with_the_last_tensor():
    tensor = pages.zeros((300 * MIB,), torch.uint8)
    address = tensor.data_ptr()
    assert "hg" in _flags(address)
    assert address % (2 * MIB) == 0
    pages._open.clear()
    part = tensor[5:6]
    del tensor
    gc.collect()
    assert "hg" in _flags(address)
    del part
    gc.collect()
    assert "hg" not in _flags(address)


def _flags(address: int) -> list[str]:
    """Flags of the mapping that holds an address: "hg" is the wish for huge pages."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and not first.endswith(":"):
            start, end = (int(word, 16) for word in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return line.split()[1:]
    return []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_untouched_memory_is_not_resident():
    freed = torch.ones(8 * MIB, dtype=torch.uint8)
    del freed
    before = _resident()
    made = [pages.untouched((MIB,), torch.bfloat16) for _ in range(100)]
    assert _resident() - before < 10 * MIB
    assert not any(tensor[:: MIB // 2].any() for tensor in made)
    made[0].fill_(1)
    assert not made[1].any()
    assert pages.untouched((0, 3), torch.float32).shape == (0, 3)


def _resident() -> int:
    """Bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
