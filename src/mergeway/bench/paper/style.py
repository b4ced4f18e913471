"""How all figures look: colours that colour-blind people tell apart, and dashes and markers for when there is no colour."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mergeway.core.files import make_directory, replaced
from mergeway.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

# Okabe and Ito's palette without its yellow, which is lost on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#56B4E9", "#E69F00")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.5, 1.2, 1.5)), "-", (0, (8, 2)), (0, (3, 1, 1, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
SEQUENTIAL = "cividis"  # even in lightness, so that it reads the same in grey

_SETTINGS: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#d9d9d9",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.dpi": 150,
    "svg.fonttype": "path",
    "svg.hashsalt": "mergeway",  # the same figure is the same file
}


@contextmanager
def drawing() -> Iterator[None]:
    """The style, for as long as a figure is drawn and written."""
    try:
        import matplotlib
    except ImportError:
        raise OptionError("figures need matplotlib; install it with: pip install 'mergeway[figures]'") from None
    with matplotlib.rc_context(_SETTINGS):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches, which belongs to no window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def write_figure(figure: Figure, folder: Path, name: str) -> list[Path]:
    """The figure as PNG and SVG."""
    make_directory(folder)
    written = []
    for suffix, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
        path = folder / f"{name}.{suffix}"
        with replaced(path) as new:
            figure.savefig(new, format=suffix, metadata=metadata, bbox_inches="tight")
        written.append(path)
    return written


def line(number: int) -> dict[str, Any]:
    """Colour, dashes and marker of the n-th line of a figure; later ones are thinner, so that equal lines are both seen."""
    slim = min(number, 5)
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": DASHES[number % len(DASHES)],
        "marker": MARKERS[number % len(MARKERS)],
        "markersize": 7.0 - 0.7 * slim,
        "linewidth": 2.4 - 0.24 * slim,
    }


def band(axes: Axes, x: np.ndarray, mean: np.ndarray, std: np.ndarray, number: int) -> None:
    """One standard deviation to each side."""
    axes.fill_between(x, mean - std, mean + std, color=COLOURS[number % len(COLOURS)], alpha=0.13, linewidth=0)


def beside(side: float) -> Literal["left", "center", "right"]:
    """How text stands that is to the right (positive), to the left, or in the middle of what it names."""
    return "center" if abs(side) < 0.1 else "left" if side > 0 else "right"


def heat_map(
    axes: Axes, values: np.ndarray, columns: list[str], rows: list[str], low: float, high: float, form: str
) -> AxesImage:
    """A matrix as colours with its numbers on them; what is not a number stays empty."""
    axes.grid(visible=False)
    image = axes.imshow(values, cmap=SEQUENTIAL, vmin=low, vmax=high, aspect="equal")
    for i, row in enumerate(values):
        for k, value in enumerate(row):
            if np.isfinite(value):
                light = (value - low) / max(high - low, 1e-9) > 0.55
                size = 8 if len(values) <= 10 else 5.5
                axes.text(
                    k,
                    i,
                    form.format(value),
                    ha="center",
                    va="center",
                    fontsize=size,
                    color="black" if light else "white",
                )
    axes.set_xticks(range(len(columns)), columns, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(rows)), rows)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return image
