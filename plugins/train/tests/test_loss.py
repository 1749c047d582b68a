"""The loss that keeps no logits against the plain formula."""

import torch

from specdec_train.loss import projected_cross_entropy


def test_loss_and_gradients_are_those_of_the_formula() -> None:
    torch.manual_seed(0)
    count, laws, width, vocab = 300, 40, 16, 50  # more rows than are computed at a time
    output = torch.randn(count, width, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(vocab, width, dtype=torch.float64, requires_grad=True)
    law = torch.randn(laws, vocab, dtype=torch.float64).softmax(dim=-1)
    place, weight = torch.randint(0, laws, (count,)), torch.rand(count, dtype=torch.float64)
    logits = output @ rows.T
    expected = -(weight * (law[place] * logits.log_softmax(dim=-1)).sum(dim=-1)).sum()
    loss, best = projected_cross_entropy(output, rows, law, place, weight)
    torch.testing.assert_close(loss, expected)
    assert torch.equal(best, logits.argmax(dim=-1))
    for found, wanted in zip(
        torch.autograd.grad(3 * loss, (output, rows)), torch.autograd.grad(3 * expected, (output, rows)), strict=True
    ):
        torch.testing.assert_close(found, wanted)


def test_frozen_rows_get_no_gradient() -> None:
    output, rows = torch.randn(4, 8, requires_grad=True), torch.randn(6, 8)
    loss, _ = projected_cross_entropy(output, rows, torch.full((1, 6), 1 / 6), torch.zeros(4).long(), torch.ones(4))
    loss.backward()
    assert output.grad is not None
    with torch.no_grad():
        measured, _ = projected_cross_entropy(
            output, rows, torch.full((1, 6), 1 / 6), torch.zeros(4).long(), torch.ones(4)
        )
    torch.testing.assert_close(measured, loss.detach())
