"""Memory sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.config import format_size, from_kwargs, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1GiB", 2**30),
        ("512MB", 512_000_000),
        ("1.5GiB", 3 * 2**29),
        ("64 kib", 65536),
        ("7", 7),
        ("8B", 8),
        ("2TB", 2 * 10**12),
        (123, 123),
    ],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "bad", ["", "GiB", "1Gi", "1G", "-1GiB", "0", "1e9", "0.1B", 0, -1, True, 1.5, None, "1 GiB x"]
)
def test_bad_sizes(bad):
    with pytest.raises(ValueError, match="1GiB"):
        parse_size(bad)


@given(st.integers(1, 2**45))
def test_formatting_is_exact(size):
    assert parse_size(format_size(size)) == size


def test_the_configuration_keeps_what_was_written():
    assert parse_size(from_kwargs("m").kv_cache_memory) == 2**30
    assert from_kwargs("m", kv_cache_memory="512MB").kv_cache_memory == "512MB"
    assert from_kwargs("m", kv_cache_memory=4096).kv_cache_memory == 4096
