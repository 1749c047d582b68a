"""RMS norms for the compiled CPU kernels."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import nn

from specdec.cpu.layout import NORM_WORDS, Norm
from specdec.cpu.scratch import words
from specdec.cpu.team import KERNELS, Team
from specdec.target.compare import TOLERANCE, noise, relative_error
from specdec.target.kit import norm_weight
from specdec.target.linear import KINDS

if TYPE_CHECKING:
    from torch import Tensor


class NormWeight:
    """An RMS norm's weight and eps as kernels read them."""

    def __init__(self, weight: Tensor, eps: float, *, rounds_first: bool) -> None:
        """Describe a norm.

        Args:
            weight: [width], the factor on the normalised values.
            eps: added to the mean square.
            rounds_first: round the normalised values to the model's dtype before the factor (Llama), or only once
                after it (Gemma).
        """
        self.weight = weight.detach().float().contiguous()
        bits = int(torch.tensor(eps, dtype=torch.float32).view(torch.int32))
        self._description = (ctypes.c_int64 * NORM_WORDS)(
            self.weight.data_ptr(), bits, self.weight.numel(), int(rounds_first)
        )
        self.address: int = ctypes.addressof(self._description)


class FastNorm(nn.Module):
    """An RMS norm over the last dimension, in one compiled pass."""

    def __init__(self, norm_weight: NormWeight, weight: nn.Parameter) -> None:
        """Wrap a norm's description.

        Args:
            norm_weight: what the kernel reads.
            weight: the parameter of the module it was made from; its dtype is that of inputs and outputs.
        """
        super().__init__()
        self.weight = weight
        self.norm_weight = norm_weight
        self._team = Team()
        self._block = words(
            Norm, {Norm.TEAM: self._team.address, Norm.NORM: norm_weight.address, Norm.KIND: KINDS[weight.dtype]}
        )
        self._arguments = ctypes.addressof(self._block)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., width] -> the same shape, normalised."""
        if hidden_states.dtype != self.weight.dtype:
            raise TypeError(f"input is {hidden_states.dtype}, the norm's weight {self.weight.dtype}")
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        block, size = self._block, rows.element_size()
        block[Norm.INPUT] = rows.data_ptr()
        block[Norm.INPUT_STRIDE] = rows.stride(0) * size
        block[Norm.ROWS] = rows.shape[0]
        block[Norm.OUTPUT] = out.data_ptr()
        block[Norm.OUTPUT_STRIDE] = rows.shape[1] * size
        self._team.run(KERNELS.address("norm_region"), self._arguments)
        return out.view(hidden_states.shape)


def fast_norm(module: nn.Module) -> FastNorm | None:
    """The fast version of a module that is an RMS norm, proven on random input; None when it is not one."""
    found = norm_weight(module)
    if found is None or found[0].device.type != "cpu" or found[0].dtype not in KINDS:
        return None
    weight, eps = found
    sample = noise(8, weight.numel(), like=weight)
    expected = module(sample)
    best, error = None, float("inf")
    for factor, rounds_first in ((f, r) for f in (weight, 1.0 + weight.float()) for r in (True, False)):
        candidate = FastNorm(NormWeight(factor, eps, rounds_first=rounds_first), weight)
        its_error = relative_error(candidate(sample), expected)
        if its_error < error:
            best, error = candidate, its_error
        if error == 0.0:
            break
    return best if error <= TOLERANCE[weight.dtype] else None
