"""The kernels compile for GPUs; this needs none."""

from __future__ import annotations

from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from specdec_attention_triton import kernels
from specdec_attention_triton.backend import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")

FLOATS = {"scaling", "softcap"}
POINTERS = {
    "block_tables": "*i32",
    "query_start_loc": "*i32",
    "seq_lens": "*i32",
    "parents": "*i32",
    "cached_parents": "*i32",
    "depths": "*i32",
    "positions": "*i64",
    "words": "*i64",
    "slots": "*i64",
    "log_sums": "*fp32",
    "parts": "*fp32",
}
IN_CACHE_TYPE = {"query", "key", "value", "keys", "values", "sinks", "out"}


def built(kernel: Any, dtype: str, **constants: Any) -> str:
    """PTX for compute capability 9.0, of a kernel that fits the shared memory of smaller devices as well."""
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in IN_CACHE_TYPE:
            signature[name] = f"*{dtype}"
        else:
            signature[name] = "fp32" if name in FLOATS else POINTERS.get(name, "i32")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    compiled = compile(source, target=GPUTarget("cuda", 90, 32))
    assert compiled.metadata.shared <= 99 << 10
    return compiled.asm["ptx"]


HEADS = {"KV_HEADS": 8, "HEAD_DIM": 128, "V_HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_DV": 128}
PLAIN = {
    "GROUP": 4,
    "BLOCK_SIZE": 16,
    "WORDS": 1,
    "HAS_TREE": False,
    "HAS_SINKS": False,
    "HAS_SOFTCAP": False,
    "HAS_WINDOW": False,
    "HAS_CHUNK": False,
    "WIDEN": False,
    "PART": 1024,
}
TILES = {"bf16": {"BLOCK_M": 32, "BLOCK_N": 64}, "fp32": {"BLOCK_M": 32, "BLOCK_N": 32}}
"""As the backend has them."""
EVERYTHING = {f"HAS_{name}": True for name in ("TREE", "SINKS", "SOFTCAP", "WINDOW", "CHUNK")}


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [{}, EVERYTHING | {"WORDS": 2, "PART": 0}], ids=["decode", "everything"])
def test_attention(options: dict[str, Any], dtype: str) -> None:
    ptx = built(kernels.attend, dtype, **HEADS, **(PLAIN | TILES[dtype] | options))
    assert ".entry attend" in ptx
    if dtype == "bf16":
        assert "mma" in ptx  # on the tensor cores


def test_the_others() -> None:
    assert ".entry" in built(kernels.store_kv, "bf16", **HEADS, BLOCK_H=8)
    assert ".entry" in built(kernels.ancestor_words, "bf16", WORDS=1, BLOCK=64)
    joined = {"HEADS": 32, "V_HEAD_DIM": 128, "PART": 1024, "PARTS": 32, "BLOCK_DV": 128}
    assert ".entry" in built(kernels.join_parts, "bf16", **joined)
