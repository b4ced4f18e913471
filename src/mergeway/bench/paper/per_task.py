"""OPCM Tables 2 and 3, and the radar of ODE-M Figures 2, 7 and 8: accuracy task by task."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mergeway.bench import Run
from mergeway.bench.paper import style
from mergeway.bench.paper.continual import continual_streams
from mergeway.bench.paper.published import as_published, note_of
from mergeway.bench.paper.study import Study
from mergeway.bench.paper.table import Entry, Table, Value, mark_best, over_orders

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def final_accuracies(run: Run, rule: str) -> dict[str, list[float]]:
    """What each task reaches at the end of every stream of a rule."""
    found: dict[str, list[float]] = {}
    for cell, folds in run.finished():
        if cell.label == rule:
            for task, accuracy in zip(cell.order, folds[-1].accuracies, strict=True):
                found.setdefault(task, []).append(accuracy)
    return found


def ends_by_task(study: Study) -> Table:
    """What the base and the experts reach on each task."""
    tasks = [t.name for t in study.suite.tasks]
    rows: list[list[Entry]] = [
        [
            name,
            *(Value(study.ends[side][t]) for t in tasks),
            Value(float(np.mean([study.ends[side][t] for t in tasks]))),
        ]
        for name, side in (("pre-trained", "base"), ("fine-tuned", "experts"))
    ]
    title = f"Test accuracy of the pre-trained model and of each task's own expert, suite {study.suite.name}"
    return Table("opcm-2", title, ("model", *tasks, "mean"), rows)


def end_bars(study: Study) -> Figure:
    """What the base and the experts reach on each task, as bars beside each other."""
    tasks = [t.name for t in study.suite.tasks]
    figure = style.new_figure(max(5.0, 0.7 * len(tasks)), 3.4)
    axes = figure.add_subplot()
    x = np.arange(len(tasks))
    for number, (name, side) in enumerate((("pre-trained", "base"), ("fine-tuned", "experts"))):
        heights = [study.ends[side][t] for t in tasks]
        hatch = "" if number else "///"
        axes.bar(
            x + 0.4 * number - 0.2,
            heights,
            0.38,
            label=name,
            color=style.COLOURS[number],
            hatch=hatch,
            edgecolor="white",
        )
    axes.set_xticks(x, tasks, rotation=45, ha="right", rotation_mode="anchor")
    axes.set_ylabel("test accuracy, %")
    axes.set_ylim(0, 100)
    axes.grid(visible=False, axis="x")
    axes.set_axisbelow(True)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    return figure


def rules_by_task(study: Study) -> Table:
    """What each task reaches at the end of the longest stream."""
    tasks = [t.name for t in study.suite.tasks[: study.longest]]
    ran = as_published(study.rules, study.longest)
    run = study.run(list(ran.values()))
    rows: list[list[Entry]] = []
    for shown, rule in ran.items():
        found = final_accuracies(run, rule)
        means = np.mean([found[t] for t in tasks], axis=0)
        rows.append([shown, *(over_orders(found[t]) for t in tasks), over_orders(means.tolist())])
    title = f"Test accuracy by task at the end of streams of {study.longest} tasks of {study.suite.name}"
    note = f"Mean ± std over {study.orders_in_words}; {study.samples} calibration samples. {note_of(study.rules, [study.longest])}"
    everything = [["continually fine-tuned", *_continual(study, tasks)], *mark_best(rows)]
    return Table("opcm-3", title, ("rule", *tasks, "mean"), everything, note.strip(), (1,))


def _continual(study: Study, tasks: list[str]) -> list[Entry]:
    streams = continual_streams(study, len(tasks))
    if streams is None:
        return [None] * (len(tasks) + 1)
    ends = np.array([[matrix[-1, order.index(t)] for t in tasks] for order, matrix in streams])
    return [over_orders(column) for column in [*ends.T, ends.mean(axis=1)]]


def radar(study: Study, length: int, utilities: str = "uniform") -> Figure:
    """The accuracy of each task at the end, one closed line for each rule."""
    tasks = [t.name for t in study.suite.tasks[:length]]
    ran = as_published(study.featured, length, utilities)
    run = study.run(list(ran.values()), length, utilities)
    values = {}
    for shown, rule in ran.items():
        found = final_accuracies(run, rule)
        values[shown] = [float(np.mean(found[t])) for t in tasks]
    return draw_radar(tasks, values)


def draw_radar(tasks: list[str], values: dict[str, list[float]]) -> Figure:
    """Draw the lines; the centre is the ten below the lowest accuracy."""
    from matplotlib.projections.polar import PolarAxes

    figure = style.new_figure(5.6, 4.2)
    axes = figure.add_axes((0.08, 0.1, 0.55, 0.8), projection="polar")
    assert isinstance(axes, PolarAxes)
    angles = np.linspace(0, 2 * np.pi, len(tasks), endpoint=False)
    low = max(0.0, 10.0 * np.floor(min(map(min, values.values())) / 10 - 0.5))
    for number, (rule, accuracies) in enumerate(values.items()):
        axes.plot([*angles, angles[0]], [*accuracies, accuracies[0]], label=rule, **style.line(number))
    axes.set_theta_offset(np.pi / 2)
    axes.set_theta_direction(-1)
    axes.set_xticks(angles, tasks)
    for label, angle in zip(axes.get_xticklabels(), angles, strict=True):
        label.set_horizontalalignment(style.beside(np.sin(angle)))
    axes.set_ylim(low, 100)
    ticks = [t for t in range(0, 101, 20 if 100 - low > 50 else 10) if t > low]
    axes.set_yticks(ticks, [str(t) for t in ticks])
    axes.set_rlabel_position(180 / max(len(tasks), 2))
    figure.legend(loc="center left", bbox_to_anchor=(0.84, 0.5), title="rule")
    return figure
