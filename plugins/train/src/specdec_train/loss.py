"""Cross entropy of a linear projection against soft labels, without keeping the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ROWS_AT_A_TIME = 256
"""Logits of so many rows exist at once: they stay in a processor's cache, and bound the memory on a GPU."""


class _ProjectedCrossEntropy(torch.autograd.Function):
    """The gradient is computed with the loss, while the logits are there."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, rows: Tensor, law: Tensor, place: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        wants_output, wants_rows = ctx.needs_input_grad[:2]
        loss = output.new_zeros(())
        grad_output = torch.empty_like(output) if wants_output else None
        grad_rows = torch.zeros_like(rows) if wants_rows else None
        best = torch.empty(len(output), dtype=torch.int64, device=output.device)
        for begin in range(0, len(output), _ROWS_AT_A_TIME):
            part = slice(begin, begin + _ROWS_AT_A_TIME)
            logits, labels = output[part] @ rows.T, law[place[part]]
            best[part] = logits.argmax(dim=-1)
            normaliser = logits.logsumexp(dim=-1)
            loss += (weight[part] * (normaliser - torch.linalg.vecdot(labels, logits))).sum()
            if grad_output is None and grad_rows is None:
                continue
            error = logits.sub_(normaliser[:, None]).exp_().sub_(labels).mul_(weight[part, None])
            if grad_output is not None:
                torch.matmul(error, rows, out=grad_output[part])
            if grad_rows is not None:
                grad_rows.addmm_(error.T, output[part])
        ctx.grad_output, ctx.grad_rows = grad_output, grad_rows
        ctx.mark_non_differentiable(best)
        return loss, best

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _grad_best: Tensor) -> tuple[Tensor | None, ...]:
        grads = (None if grad is None else grad * grad_loss for grad in (ctx.grad_output, ctx.grad_rows))
        return (*grads, None, None, None)


def projected_cross_entropy(
    output: Tensor, rows: Tensor, law: Tensor, place: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """The weighted sum of ``-sum(law * log_softmax(output @ rows.T))``, and what the logits are highest for.

    Args:
        output: [N, width], float32.
        rows: [V, width], float32.
        law: [M, V]: distributions.
        place: int64 [N]: which distribution is the label of each output.
        weight: [N]: of each output in the sum.

    Returns:
        Scalar with gradients for ``output`` and ``rows``, and int64 [N].
    """
    loss, best = _ProjectedCrossEntropy.apply(output, rows, law, place, weight)
    return loss, best
