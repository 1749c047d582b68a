"""Packed linears give what plain ones give, and the same bits whatever else is computed with them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from specdec.target.linear import PackedEmbedding, PackedLinear, PackedWeight, packable
from specdec.target.norm import FastNorm, NormWeight

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def _settings():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


def linear(inputs: int, outputs: int, dtype: torch.dtype, *, bias: bool = False) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype)


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = TOLERANCE[want.dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 9, 17, 300])
@pytest.mark.parametrize(("inputs", "outputs"), [(2, 1), (64, 32), (70, 33), (96, 200)])
def test_equals_the_plain_linear(inputs: int, outputs: int, rows: int, dtype: torch.dtype) -> None:
    """Any width, any number of rows, with a bias."""
    plain = linear(inputs, outputs, dtype, bias=True)
    x = torch.randn(rows, inputs).to(dtype)
    assert_close(PackedLinear(PackedWeight.of([plain]))(x), plain(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_joins_linears_of_one_input(dtype: torch.dtype) -> None:
    """Outputs are concatenated; a missing bias counts as zeros."""
    parts = [linear(64, 40, dtype, bias=True), linear(64, 8, dtype), linear(64, 20, dtype, bias=True)]
    x = torch.randn(2, 3, 64).to(dtype)
    assert_close(PackedLinear(PackedWeight.of(parts))(x), torch.cat([part(x) for part in parts], dim=-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 48, 50])
@pytest.mark.parametrize(
    ("gate_name", "function"),
    [("silu", nn.functional.silu), ("gelu_tanh", lambda x: nn.functional.gelu(x, approximate="tanh"))],
)
def test_gated(gate_name: str, function, width: int, dtype: torch.dtype) -> None:
    """The gate's activation times the other half, also where panels are padded."""
    gate, up = linear(32, width, dtype, bias=True), linear(32, width, dtype)
    x = torch.randn(7, 32).to(dtype)
    packed = PackedLinear(PackedWeight.gated(gate, up), gate_name, width)
    assert_close(packed(x), function(gate(x)) * up(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    """Alone, among few, among many, on one thread or two: verifying drafts cannot change what a token gets."""
    packed = PackedLinear(PackedWeight.of([linear(576, 96, dtype)]))
    x = torch.randn(40, 576).to(dtype)
    together = packed(x)
    assert torch.equal(torch.cat([packed(row[None]) for row in x]), together)
    assert torch.equal(packed(x[3:9]), together[3:9])
    torch.set_num_threads(2)
    assert torch.equal(packed(x), together)
    assert torch.equal(packed(x[:1]), together[:1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_weight_can_be_read_back(dtype: torch.dtype) -> None:
    """Rows come back exactly, for embeddings and for modules that read a weight."""
    plain = linear(34, 77, dtype)
    weight = PackedWeight.of([plain])
    index = torch.tensor([[0, 76], [31, 32]])
    assert torch.equal(weight.rows(index), plain.weight[index])
    assert torch.equal(PackedLinear(weight).weight, plain.weight)
    assert torch.equal(PackedEmbedding(weight, None)(index), plain.weight[index])
    assert torch.equal(PackedEmbedding(weight, torch.tensor(3.0, dtype=dtype))(index), plain.weight[index] * 3)


def test_rows_outside_the_weight_are_an_error() -> None:
    """Token ids out of range must not read other memory."""
    weight = PackedWeight.of([linear(32, 40, torch.float32)])
    for index in (-1, 40, 1 << 40):
        with pytest.raises(IndexError, match=r"1 of the indices are not rows 0 to 39"):
            weight.rows(torch.tensor([0, index]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 20])
def test_a_norm_in_front(rows: int, dtype: torch.dtype) -> None:
    """The same bits as the norm and the linear one after the other."""
    weight = nn.Parameter(torch.randn(64).to(dtype))
    norm = NormWeight(weight, 1e-5, rounds_first=True)
    packed = PackedLinear(PackedWeight.of([linear(64, 40, dtype)]))
    x = torch.randn(rows, 64).to(dtype)
    assert torch.equal(packed.normalized(norm, x), packed(FastNorm(norm, weight)(x)))


def test_strided_input() -> None:
    """Inputs may be slices of wider rows, or transposed."""
    plain = linear(32, 16, torch.float32)
    packed = PackedLinear(PackedWeight.of([plain]))
    wide, tall = torch.randn(5, 80), torch.randn(32, 5)
    assert_close(packed(wide[:, 8:40]), plain(wide[:, 8:40]))
    assert_close(packed(tall.t()), plain(tall.t()))


def test_no_rows() -> None:
    """An empty input gives an empty output."""
    assert PackedLinear(PackedWeight.of([linear(32, 16, torch.float32)]))(torch.empty(0, 32)).shape == (0, 16)


def test_another_dtype_is_refused() -> None:
    """Reading one dtype as another would give numbers without meaning."""
    packed = PackedLinear(PackedWeight.of([linear(32, 16, torch.float32)]))
    with pytest.raises(TypeError, match=r"input is torch.bfloat16, weight is torch.float32"):
        packed(torch.zeros(1, 32, dtype=torch.bfloat16))


def test_what_can_be_packed() -> None:
    """Plain linears of even width in float32 or bfloat16, not subclasses that may compute something else."""

    class Special(nn.Linear):
        pass

    assert packable(linear(4, 3, torch.float32), linear(6, 3, torch.bfloat16))
    assert not packable(linear(3, 4, torch.float32))
    assert not packable(linear(4, 3, torch.float16))
    assert not packable(Special(4, 3))


def test_weights_at_any_address_of_a_file() -> None:
    """A safetensors file aligns tensors to no more than their own elements."""
    memory = torch.randn(33 * 8 + 1).bfloat16()
    rows = memory[1:].view(33, 8)
    packed = PackedWeight(rows, None)
    assert torch.equal(packed.rows(torch.arange(33)), rows)


@pytest.mark.parametrize("few", [0, 1 << 30])
@pytest.mark.parametrize("width", [32, 50])
def test_packs_alike_in_one_thread_and_in_several(few: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.target.linear._FEW_BYTES", few)
    gate, up = nn.Linear(6, width), nn.Linear(6, width)
    packed = PackedWeight.gated(gate, up)
    columns = packed.panels.view(torch.float32).transpose(1, 2).reshape(-1, 2, 16, 6)
    for half, linear in enumerate((gate, up)):
        assert torch.equal(columns[:, half].reshape(-1, 6)[:width], linear.weight)
        assert not columns[:, half].reshape(-1, 6)[width:].any()
