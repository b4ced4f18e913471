"""ODE-M Figures 5 and 6: how γ and the alignment are spread along the trajectories of all streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mergeway.bench import Run
from mergeway.bench.paper import style
from mergeway.bench.paper.study import Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINS = 25


def along_the_way(run: Run, what: str) -> tuple[list[float], list[float]]:
    """Time and value at every step of every trajectory; the last entry of each repeats the step before and is left out."""
    times: list[float] = []
    values: list[float] = []
    for _, folds in run.finished():
        for fold in folds:
            path = fold.details.get("trajectory", {})
            times += path.get("times", [])[:-1]
            values += path.get(what, [])[:-1]
    return times, values


def gamma(study: Study) -> Figure:
    """γ against t."""
    return _histogram(study, "gammas", r"damping $\gamma$", 1.0)


def alignment(study: Study) -> Figure:
    """The share of u that lies along the gradient, against t."""
    return _histogram(study, "alignments", r"alignment $\Vert P_g u\Vert/\Vert u\Vert$")


def _histogram(study: Study, what: str, label: str, top: float | None = None) -> Figure:
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import LogLocator, NullLocator

    times, values = along_the_way(study.run([study.ode]), what)
    figure = style.new_figure(5.4, 3.5)
    axes = figure.add_subplot()
    axes.grid(visible=False)
    # Operating times end at 1/2 with uniform utilities; the axis ends where the steps do.
    end = max(0.05, float(np.ceil(20 * max(times, default=0.0) + 1e-9)) / 20)
    # In a model of many parameters two directions are nearly orthogonal, so an axis up to 1 would show nothing.
    top = top or next((t for t in (0.05, 0.1, 0.2, 0.5) if t >= max(values, default=0.0)), 1.0)
    bins, limits = (round(end / 0.05), BINS), ((0, end), (0, top))
    counts, *_, image = axes.hist2d(times, values, bins=bins, range=limits, norm=LogNorm(), cmap=style.SEQUENTIAL)
    bar = figure.colorbar(image, ax=axes, label=f"steps, of {int(counts.sum())}", format="{x:g}")
    bar.ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("integration time t")
    axes.set_ylabel(label)
    figure.tight_layout()
    return figure
