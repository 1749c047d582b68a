"""The picture of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specdec_train.loop import Evaluation


def draw(evaluations: Sequence[Evaluation], path: Path, title: str) -> None:
    """Draw held-out loss, accuracy per draft step and acceptance length over the updates into a PNG file."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    updates = [evaluation.update for evaluation in evaluations]
    figure, (loss, accuracy, length) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    loss.plot(updates, [evaluation.loss for evaluation in evaluations], marker=".")
    loss.set_title("held-out loss")
    for step in range(len(evaluations[-1].accuracy)):
        accuracy.plot(updates, [e.accuracy[step] for e in evaluations], marker=".", label=f"draft step {step + 1}")
    accuracy.set_title("held-out accuracy")
    accuracy.set_ylim(0, 1)
    accuracy.legend()
    length.plot(updates, [evaluation.acceptance_length for evaluation in evaluations], marker=".")
    length.set_title("acceptance length")
    for axes in (loss, accuracy, length):
        axes.set_xlabel("updates")
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    plt.close(figure)
