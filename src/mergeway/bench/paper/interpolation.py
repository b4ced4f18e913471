"""Holistic CMM Figures 1, 2 and 4: accuracy and loss between the models after the first and after the second task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mergeway.bench.paper import style
from mergeway.bench.paper.methods import one_thread, protocol
from mergeway.bench.paper.pipeline import Stages, Stream, interpolate, settings_of
from mergeway.bench.paper.study import Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POINTS = [i / 10 for i in range(11)]
LINES = {
    "standard, line": (False, "linear"),
    "standard, Fisher": (False, "fisher"),
    "tangent, line": (True, "linear"),
    "tangent, Fisher": (True, "fisher"),
}


def line_against_fisher(study: Study) -> Figure:
    """Figure 1: the straight line against Eq. 4, for both kinds of training."""
    return _draw(study, list(LINES))


def along_the_line(study: Study) -> Figure:
    """Figure 2: standard against tangent training on the straight line."""
    return _draw(study, ["standard, line", "tangent, line"])


def along_fisher(study: Study) -> Figure:
    """Figure 4: standard against tangent training under Eq. 4."""
    return _draw(study, ["standard, Fisher", "tangent, Fisher"])


def sweep_between(study: Study, tangent: bool, seed: int) -> dict[str, list[tuple[float, float]]]:
    """The mean accuracy and loss of the two tasks at every λ, for both kinds of merging."""
    tasks = [t.name for t in study.suite.tasks[:2]]

    def work() -> dict[str, list[tuple[float, float]]]:
        stream = Stream(study.suite, tasks, *settings_of(study.suite, seed))
        first, second = stream.pipeline(Stages(None, tangent=tangent))
        found: dict[str, list[tuple[float, float]]] = {}
        for how in ("linear", "fisher"):
            for lam in POINTS:
                between = interpolate(
                    stream.base, first.deployed, second.deployed, first.moments, second.moments, lam, how
                )
                judged = study.suite.judge(between, tasks, tasks, through=stream.reading(tangent), classifier="head")
                accuracy, loss = np.mean(judged, axis=0)
                found.setdefault(how, []).append((float(accuracy), float(loss)))
        return found

    with one_thread():
        name = f"holistic-between-{'tangent' if tangent else 'standard'}-{seed}"
        return study.kept(name, {**protocol(study, seed), "points": POINTS}, work)


def _draw(study: Study, lines: Sequence[str]) -> Figure:
    figure = style.new_figure(8.0, 3.1)
    panels = figure.subplots(1, 2)
    for line in lines:
        tangent, how = LINES[line]
        number = list(LINES).index(line)  # a line looks the same in every figure
        values = np.array([sweep_between(study, tangent, seed)[how] for seed in range(study.orders)])
        for axes, curves in zip(panels, (values[..., 0], values[..., 1]), strict=True):
            style.band(axes, np.array(POINTS), curves.mean(0), curves.std(0), number)
            axes.plot(POINTS, curves.mean(0), label=line, **style.line(number))
    first, second = (t.name for t in study.suite.tasks[:2])
    for axes, label in zip(panels, ("mean accuracy of both tasks, %", "mean loss of both tasks"), strict=True):
        axes.set_xlabel(f"λ, from task {first} to task {second}")
        axes.set_ylabel(label)
    panels[1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), title="training, merge")
    figure.tight_layout()
    return figure
