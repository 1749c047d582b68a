"""Linears whose weights are packed for the compiled CPU kernels.

The packed copy replaces the original. Products are computed by `specdec.cpu`; every output element is one chain of
float32 multiply-adds in a fixed order, so a row's result does not depend on which rows share the batch: a token gets
the same logits whether it is decoded alone, verified as part of a draft or computed in a prefill chunk, in bfloat16
too.

Measured against the alternatives on two cores (AVX-512 without AMX), all linears of SmolLM2-135M in bfloat16, in
milliseconds for 1, 6, 16 and 96 rows: ``torch.nn.functional.linear`` 15, 25, 41, 173; oneDNN with prepacked weights 8,
14, 32, 161.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from specdec.cpu.layout import (
    BFLOAT16,
    FLOAT32,
    GELU_TANH,
    LANES,
    LINEAR_WORDS,
    PANEL,
    SILU,
    STORE,
    Gather,
    Product,
)
from specdec.cpu.pages import zeros
from specdec.cpu.scratch import reserve, words
from specdec.cpu.team import KERNELS, Team
from specdec.target.kit import bias_or_zeros

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.target.norm import NormWeight

KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
"""Element kinds the kernels know."""

GATES = {"silu": SILU, "gelu_tanh": GELU_TANH}
_FEW_BYTES = 8 << 20
"""Below this, one thread packs a weight faster than several."""
_LONG_ROWS, _LONG_BYTES = 64, 64 << 20
"""From this many rows, or bytes of weights, on a product takes long enough to let other Python threads run."""


def packable(*linears: nn.Module) -> bool:
    """Whether the kernels can serve these linears: plain `nn.Linear` of an even input width, on the CPU."""
    return all(
        type(linear) is nn.Linear
        and linear.weight.device.type == "cpu"
        and linear.weight.dtype in KINDS
        and linear.in_features % 2 == 0
        for linear in linears
    )


class PackedWeight:
    """The weights of one or several linears with the same input, packed as panels of 32 columns
    (`specdec.cpu.tiles`)."""

    def __init__(self, rows: Tensor, bias: Tensor | None, *, gated_by: Tensor | None = None) -> None:
        """Pack a weight.

        Args:
            rows: [out_features, in_features], float32 or bfloat16, in_features even.
            bias: [out_features] or None; with a gate [2 * out_features], as in the panels.
            gated_by: [out_features, in_features], of which each panel then has 16 rows beside 16 of ``rows``.
        """
        parts = [rows] if gated_by is None else [gated_by, rows]
        width, self.in_features = PANEL // len(parts), rows.shape[1]
        self.num_panels = -(-rows.shape[0] // width)
        self.out_features = rows.shape[0] if gated_by is None else self.num_panels * PANEL
        self.dtype = rows.dtype
        panels = zeros((self.num_panels, self.in_features * rows.element_size() // 4, PANEL), torch.int32)
        for part, columns in zip(parts, panels.split(width, dim=2), strict=True):
            _pack(_as_words(part.detach()), columns)
        self.panels = panels
        """int32 [panels, in_features (bfloat16: / 2), 32]: float32 values, or bfloat16 values of neighbouring
        inputs."""
        self.bias = None if bias is None else bias.detach().float().clone()
        self._description = (ctypes.c_int64 * LINEAR_WORDS)(
            panels.data_ptr(),
            KINDS[self.dtype],
            self.in_features // 2,
            self.num_panels,
            self.out_features,
            0 if self.bias is None else self.bias.data_ptr(),
        )
        self.address: int = ctypes.addressof(self._description)
        """Of the description that kernels read."""
        self._team = Team()
        self._gather = words(
            Gather,
            {
                Gather.TEAM: self._team.address,
                Gather.PANELS: panels.data_ptr(),
                Gather.ROW_WORDS: panels.shape[1],
                Gather.NUM_ROWS: self.out_features,
            },
        )

    @property
    def num_bytes(self) -> int:
        """Memory that the packed values take."""
        return self.panels.numel() * self.panels.element_size()

    @staticmethod
    def of(linears: Sequence[nn.Linear]) -> PackedWeight:
        """Pack linears one after another: the output is their outputs concatenated."""
        return PackedWeight(_joined([linear.weight for linear in linears]), _joined_bias(linears))

    @staticmethod
    def gated(gate: nn.Linear, up: nn.Linear) -> PackedWeight:
        """Pack a gate and an up projection so that each panel holds 16 columns of either."""
        bias = None
        if any(linear.bias is not None for linear in (gate, up)):
            padding = -gate.out_features % LANES
            halves = [nn.functional.pad(bias_or_zeros(linear).detach(), (0, padding)) for linear in (gate, up)]
            bias = torch.stack([half.unflatten(0, (-1, LANES)) for half in halves], dim=1).flatten()
        return PackedWeight(up.weight, bias, gated_by=gate.weight)

    def rows(self, index: Tensor) -> Tensor:
        """Rows of the original weight.

        Args:
            index: int64 [...].

        Returns:
            [..., in_features], a fresh tensor.

        Raises:
            IndexError: an index is outside the weight.
        """
        index = index.contiguous()
        out = torch.empty(*index.shape, self.in_features, dtype=self.dtype)
        block = self._gather
        block[Gather.INDEX] = index.data_ptr()
        block[Gather.ROWS] = index.numel()
        block[Gather.OUTPUT] = out.data_ptr()
        block[Gather.OUTSIDE] = 0
        self._team.run(KERNELS.address("gather_region"), ctypes.addressof(block))
        if block[Gather.OUTSIDE]:
            raise IndexError(f"{block[Gather.OUTSIDE]} of the indices are not rows 0 to {self.out_features - 1}")
        return out


def _as_words(rows: Tensor) -> Tensor:
    """The same memory as int32 where it may be read so, else a copy's: files may hold tensors at any even address."""
    rows = rows.contiguous()
    if rows.data_ptr() % 4 or rows.storage_offset() * rows.element_size() % 4:
        rows = rows.clone()
    return rows.view(torch.int32)


def _pack(rows: Tensor, columns: Tensor) -> None:
    """Write int32 rows [N, W] as the columns of panels [P, W, columns each]; what N leaves of the last is not written.

    NumPy copies in one thread, without the time that it takes to start several, which for a layer of a small model is
    most of it.
    """
    width = columns.shape[2]
    whole, rest = divmod(rows.shape[0], width)
    target, source = columns[:whole], rows[: whole * width].view(whole, width, rows.shape[1]).transpose(1, 2)
    if source.nbytes < _FEW_BYTES:
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source)
    if rest:
        columns[whole, :, :rest] = rows[whole * width :].t()


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([part.detach() for part in parts])


def _joined_bias(linears: Sequence[nn.Linear]) -> Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    return _joined([bias_or_zeros(linear) for linear in linears])


class PackedEmbedding(nn.Module):
    """Token embeddings read from the packed weight of a tied output linear."""

    def __init__(self, weight: PackedWeight, scale: Tensor | None) -> None:
        """Share a packed weight.

        Args:
            weight: of the output linear.
            scale: a factor on the embeddings, for models that have one.
        """
        super().__init__()
        self.packed = weight
        self._scale = scale

    @property
    def weight(self) -> Tensor:
        """The embedding table [vocabulary, width], unpacked into a fresh tensor."""
        return self.packed.rows(torch.arange(self.packed.out_features))

    def forward(self, input_ids: Tensor) -> Tensor:
        """int64 [...] -> [..., width]."""
        rows = self.packed.rows(input_ids)
        return rows if self._scale is None else rows * self._scale


class PackedLinear(nn.Module):
    """A linear over a `PackedWeight`; with a gate, the activation of one half of the outputs times the other half."""

    def __init__(self, weight: PackedWeight, gate: str | None = None, out_features: int | None = None) -> None:
        """Wrap a packed weight.

        Args:
            weight: the packed weight, which may be shared.
            gate: a key of `GATES` when ``weight`` was packed by `PackedWeight.gated`.
            out_features: width of the output when it is not the weight's own (gated weights are padded).
        """
        super().__init__()
        self.packed = weight
        self.in_features = weight.in_features
        self.out_features = out_features or weight.out_features
        self._row_width = weight.out_features if gate is None else weight.out_features // 2
        self._heavy = weight.num_bytes >= _LONG_BYTES
        mode = STORE if gate is None else GATES[gate]
        self._team = Team()
        self._block = words(
            Product,
            {
                Product.TEAM: self._team.address,
                Product.LINEAR: weight.address,
                Product.KIND: KINDS[weight.dtype],
                Product.INPUT_WIDTH: weight.in_features,
                Product.MODE: mode,
            },
        )
        self._arguments = ctypes.addressof(self._block)

    @property
    def weight(self) -> Tensor:
        """The original weight [out_features, in_features], unpacked into a fresh tensor; for the rare module that
        reads a linear's weight itself."""
        return self.packed.rows(torch.arange(self.packed.out_features))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features], in the dtype of the weight."""
        return self._multiply(hidden_states, 0)

    def normalized(self, norm: NormWeight, hidden_states: Tensor) -> Tensor:
        """The output for the RMS norm of ``hidden_states``, in one region."""
        return self._multiply(hidden_states, norm.address)

    def _multiply(self, hidden_states: Tensor, norm: int) -> Tensor:
        rows = hidden_states.reshape(-1, self.in_features)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        if rows.dtype != self.packed.dtype:
            raise TypeError(f"input is {rows.dtype}, weight is {self.packed.dtype}")
        num_rows = rows.shape[0]
        out = rows.new_empty(num_rows, self._row_width)
        area = reserve(self.in_features)
        block, size = self._block, rows.element_size()
        block[Product.INPUT] = rows.data_ptr()
        block[Product.INPUT_STRIDE] = rows.stride(0) * size
        block[Product.NORM] = norm
        block[Product.ROWS] = num_rows
        block[Product.OUTPUT] = out.data_ptr()
        block[Product.OUTPUT_STRIDE] = self._row_width * size
        block[Product.SCRATCH] = area.address
        block[Product.SCRATCH_STRIDE] = area.stride
        block[Product.BLOCK_ROWS] = area.block_rows
        self._team.run(KERNELS.address("linear_region"), self._arguments, long=self._heavy or num_rows >= _LONG_ROWS)
        if self._row_width != self.out_features:
            out = out[:, : self.out_features]
        return out.view(*hidden_states.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """What `repr` shows."""
        return f"in_features={self.in_features}, out_features={self.out_features}, dtype={self.packed.dtype}"
