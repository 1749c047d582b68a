"""The kernels compile for GPUs; this needs none."""

from __future__ import annotations

from typing import Any

import pytest
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from specdec_kernels_triton import kernels
from specdec_kernels_triton.backend import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled")

TYPES = {
    **dict.fromkeys(("rows", "seeds", "positions", "rejected", "prob_rows", "tokens", "token_ids", "out"), "*i64"),
    **dict.fromkeys(("temperature", "probs", "scores", "weights", "sums"), "*fp32"),
    **dict.fromkeys(("normalizers", "log_normalizers"), "*fp64"),
    "faults": "*i32",
    "accepted": "*i1",
}
OPTIONS = {
    "purpose": 2,
    "HAS_ROWS": True,
    "HAS_DRAFT": True,
    "HAS_PROBS": True,
    "TILE": 4096,
    "TILES": 32,
    "BLOCK": 128,
}


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", ["race_tiles", "race_pick", "normalize_tiles", "normalize_join", "accept_drafts", "write_words"]
)
def test_kernels_compile(name: str, dtype: str) -> None:
    kernel: Any = getattr(kernels, name)
    constants = {option: value for option, value in OPTIONS.items() if option in kernel.arg_names}
    types = TYPES | {"logits": f"*{dtype}", "largest": "*i64" if name == "accept_drafts" else "*fp32"}
    signature = {arg: "constexpr" if arg in constants else types.get(arg, "i32") for arg in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    assert f".entry {name}" in compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
