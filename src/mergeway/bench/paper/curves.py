"""OPCM Figures 5, 6, 7 and 13 to 15: accuracy over the stream, over α and λ, and λ(t) beside √t."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mergeway.bench import Run
from mergeway.bench.paper import style
from mergeway.bench.paper.published import as_published
from mergeway.bench.paper.study import Study, with_option

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ALPHAS = tuple(i / 10 for i in range(1, 11))
SCALINGS = tuple(i / 10 for i in range(11))


def over_the_stream(run: Run, rule: str) -> np.ndarray:
    """The mean accuracy on the tasks seen after each fold: a row for every order."""
    return np.array([[np.mean(f.accuracies) for f in folds] for cell, folds in run.finished() if cell.label == rule])


def accuracy_over_tasks(study: Study) -> Figure:
    """ACC over the number of tasks folded, with a band of one standard deviation over the orders."""
    ran = as_published(study.featured, study.longest)
    run = study.run(list(ran.values()))
    figure = style.new_figure(6.2, 3.8)
    axes = figure.add_subplot()
    x = np.arange(1, study.longest + 1)
    for number, (shown, rule) in enumerate(ran.items()):
        curves = over_the_stream(run, rule)
        mean, std = curves.mean(0), curves.std(0)
        style.band(axes, x, mean, std, number)
        axes.plot(x, mean, label=shown, **style.line(number))
    tasks = [t.name for t in study.suite.tasks[: study.longest]]
    for side in ("experts", "base"):
        level = float(np.mean([study.ends[side][t] for t in tasks]))
        axes.axhline(level, color="#595959", linewidth=0.9, linestyle=(0, (1, 2)))
        axes.annotate(side, (1.01, level), xycoords=("axes fraction", "data"), va="center", color="#595959")
    axes.set_xticks(x)
    axes.set_xlabel("tasks folded in")
    axes.set_ylabel("mean accuracy on the tasks seen, %")
    axes.legend(loc="center left", bbox_to_anchor=(1.13, 0.5), title="rule")
    return figure


def swept(study: Study, rule: str, option: str, values: Sequence[float], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of ACC for each value of an option."""
    reached = [study.run([with_option(rule, option, v)], length).rows()[0] for v in values]
    return np.array([r["acc"] for r in reached]), np.array([r["acc_std"] for r in reached])


def alpha_sweep(study: Study) -> Figure:
    """OPCM over its projection threshold, longest streams."""
    return _one_panel(study, *_ALPHA, [study.longest])


def alpha_by_length(study: Study) -> Figure:
    """OPCM over its projection threshold, every stream length."""
    return _one_panel(study, *_ALPHA, study.lengths)


def scaling_by_length(study: Study) -> Figure:
    """Task arithmetic over its scaling factor, every stream length."""
    return _one_panel(study, *_SCALING, study.lengths)


def both_sweeps(study: Study) -> Figure:
    """Both sweeps beside each other on one scale."""
    figure = style.new_figure(8.4, 3.4)
    left = figure.add_subplot(1, 2, 1)
    right = figure.add_subplot(1, 2, 2, sharey=left)
    _sweep_panel(left, study, *_SCALING, study.lengths)
    _sweep_panel(right, study, *_ALPHA, study.lengths)
    left.set_title("(a) task-arithmetic")
    right.set_title("(b) opcm")
    right.set_ylabel("")
    right.legend(title="stream", loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.tight_layout()
    return figure


_ALPHA = ("opcm", "alpha", ALPHAS, "projection threshold α")
_SCALING = ("task-arithmetic", "scaling", SCALINGS, "scaling factor λ")


def _one_panel(
    study: Study, rule: str, option: str, values: Sequence[float], label: str, lengths: Sequence[int]
) -> Figure:
    figure = style.new_figure(5.2, 3.4)
    axes = figure.add_subplot()
    _sweep_panel(axes, study, rule, option, values, label, lengths)
    if len(lengths) > 1:
        axes.legend(title="stream", loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.tight_layout()
    return figure


def _sweep_panel(
    axes: Axes, study: Study, rule: str, option: str, values: Sequence[float], label: str, lengths: Sequence[int]
) -> None:
    x = np.array(values)
    for number, length in enumerate(lengths):
        mean, std = swept(study, rule, option, values, length)
        style.band(axes, x, mean, std, number)
        axes.plot(x, mean, label=f"{length} tasks", **style.line(number))
    axes.set_xticks(x)
    axes.set_xlabel(label)
    axes.set_ylabel("ACC, %")


def scaling_factors(run: Run) -> np.ndarray:
    """λ after each fold of `opcm`: a row for every order."""
    return np.array([[f.facts["lambda"] for f in folds] for _, folds in run.finished()])


def adaptive_scaling(study: Study) -> Figure:
    """OPCM's adaptive λ(t) beside √t."""
    lambdas = scaling_factors(study.run(["opcm"]))
    figure = style.new_figure(5.2, 3.4)
    axes = figure.add_subplot()
    x = np.arange(1, study.longest + 1)
    style.band(axes, x, lambdas.mean(0), lambdas.std(0), 0)
    axes.plot(x, lambdas.mean(0), label="λ(t), adaptive", **style.line(0))
    axes.plot(x, np.sqrt(x), color="black", linestyle="--", linewidth=1.2, label="√t")
    axes.set_xticks(x)
    axes.set_xlabel("tasks folded in, t")
    axes.set_ylabel("scaling factor λ")
    axes.legend()
    figure.tight_layout()
    return figure
