"""The picture of a benchmark. Needs matplotlib, which comes with ``specdec-core[plot]``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specdec.errors import SpecdecError


class PlotLibraryMissingError(SpecdecError):
    """matplotlib is not installed."""


class PlotFormatError(SpecdecError):
    """The name's ending is no format of pictures."""


def require_matplotlib(file: str) -> None:
    """Check that a picture can be drawn into this file, before what it shows is measured.

    Raises:
        PlotLibraryMissingError: with the line that installs what is missing.
        PlotFormatError: matplotlib writes no files with this ending.
    """
    if find_spec("matplotlib") is None:
        raise PlotLibraryMissingError('--plot needs matplotlib: pip install "specdec-core[plot]".')
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    ending = Path(file).suffix.removeprefix(".").lower()
    if ending and ending not in known:
        raise PlotFormatError(f"--plot {file}: there is no format '.{ending}'; there are {', '.join(sorted(known))}.")


def draw(summaries: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw speed and acceptance of the variants into a file; the name's ending chooses the format.

    Args:
        summaries: from `specdec.cli.measuring.summary`, plain decoding first.
        path: where to write.
        title: above the picture.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (speed, acceptance) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    _draw_speed(speed, summaries)
    _draw_acceptance(acceptance, summaries[1:])
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def draw_diagnosis(result: dict[str, Any], path: Path, title: str) -> None:
    """Draw what ``specdec doctor`` measured: step time by rows, and predicted speed-up by draft length.

    Args:
        result: the command's JSON.
        path: where to write.
        title: above the picture.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (cost, gain) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for times in result["step_times"]:
        rows = [int(number) for number in times["relative"]]
        cost.plot(rows, list(times["relative"].values()), "o-", label=f"batch {times['batch_size']}")
    cost.set(xlabel="rows per request (1 + draft tokens)", ylabel="step time / plain step", title="cost of verifying")
    highest = max(value for times in result["step_times"] for value in times["relative"].values())
    cost.set_ylim(0, 1.1 * highest)
    cost.legend()
    batch_size = str(result["step_times"][0]["batch_size"])
    for method in result["methods"]:
        predicted = method["predicted_speed_up"][batch_size]
        if predicted:
            gain.plot([int(k) for k in predicted], list(predicted.values()), "o-", label=method["method"])
    best = result["recommended"]
    if best is not None:
        gain.plot([best["num_speculative_tokens"]], [best["measured_speed_up"]], "k*", markersize=12, label="measured")
    gain.axhline(1.0, color="grey", linewidth=1)
    gain.set(xlabel="draft tokens (k)", ylabel="speed / plain decoding", title=f"predicted, batch {batch_size}")
    if gain.lines[1:]:
        gain.legend()
    for axes in (cost, gain):
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_speed(axes: Any, summaries: list[dict[str, Any]]) -> None:
    """Bars of the medians, with a dot for each round."""
    for position, numbers in enumerate(summaries):
        rounds = numbers["tokens_per_second_per_round"]
        axes.bar(position, numbers["tokens_per_second"], color=f"C{position}", alpha=0.7)
        axes.plot([position] * len(rounds), rounds, "k.", markersize=4)
        above = (position, max(numbers["tokens_per_second"], *rounds))
        label = f"{numbers['ratio_of_medians']:.2f}x"
        axes.annotate(label, above, xytext=(0, 4), textcoords="offset points", ha="center")
    axes.set_xticks(range(len(summaries)), [numbers["name"] for numbers in summaries])
    axes.set_ylabel("tokens/s")
    axes.set_title("speed: median, and each round")
    axes.margins(y=0.15)


def _draw_acceptance(axes: Any, summaries: list[dict[str, Any]]) -> None:
    """Part of the drafts accepted at each draft position."""
    for number, numbers in enumerate(summaries, start=1):
        rates = numbers["acceptance_rate_per_pos"]
        label = f"{numbers['name']} (acceptance length {numbers['acceptance_length']:.2f})"
        axes.plot(range(len(rates)), rates, "o-", color=f"C{number}", label=label)
    axes.set_ylim(0, 1.05)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("draft position")
    axes.set_ylabel("accepted / drafts")
    axes.set_title("acceptance")
    axes.legend()
