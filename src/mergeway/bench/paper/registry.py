"""The tables and figures by name: `ode-m-1` is Table (or Figure) 1 of the ODE-M paper, `opcm-5` and `holistic-1` those of the others.

A bare number means ODE-M's where it has one, else OPCM's; a paper's name alone means all of its that the suite's protocol admits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mergeway.bench.paper import (
    ablation,
    certified,
    comparison,
    curves,
    histograms,
    holistic,
    interpolation,
    memory,
    merging_gap,
    mismatch,
    per_task,
    sensitivity,
    similarity,
    strategies,
    style,
    trajectories,
)
from mergeway.bench.paper.formats import write_table
from mergeway.bench.paper.representation import FIGURES, before_and_after
from mergeway.bench.paper.study import Study
from mergeway.bench.paper.table import Table
from mergeway.calibration.description import PROTOCOLS
from mergeway.errors import OptionError, suggest

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Kind = Literal["table", "figure"]
PAPERS = ("ode-m", "opcm", "holistic")


@dataclass(frozen=True)
class Item:
    """One table or figure: its name, what it shows, how it is drawn from a study, and the protocols of suites it is about."""

    kind: Kind
    name: str
    title: str
    make: Callable[[Study], Table | Figure]
    protocols: tuple[str, ...] = PROTOCOLS

    def write(self, study: Study) -> tuple[Table | None, list[Path]]:
        """Run what is missing, make it, and write it in every format; the table itself, for the terminal."""
        folder = study.out / f"{self.kind}s"
        with style.drawing() if self.kind == "figure" else nullcontext():
            result = self.make(study)
            if isinstance(result, Table):
                return result, write_table(result, folder)
            return None, style.write_figure(result, folder, self.name)


_SHARED = ("cil", "dil")  # one head for all tasks

ITEMS = (
    Item("table", "ode-m-1", "ACC and BWT by rule and stream length", comparison.accuracy_and_transfer),
    Item("table", "ode-m-2", "the same under random utilities", comparison.weighted),
    Item("table", "ode-m-3", "ACC by calibration size", sensitivity.calibration_size),
    Item("table", "ode-m-4", "ACC by step size", sensitivity.step_size),
    Item("table", "ode-m-5", "time and gradients per merge", comparison.cost),
    Item("table", "ode-m-6", "accuracy along two-task trajectories", trajectories.two_task_sweeps),
    Item("table", "ode-m-7", "the best operating time beside the schedule", trajectories.time_schedule),
    Item("table", "opcm-2", "base and experts by task", per_task.ends_by_task),
    Item("table", "opcm-3", "rules by task", per_task.rules_by_task),
    Item("table", "merging-gap", "what a task loses to the others' parts, OPCM Eq. 12-13", merging_gap.merging_gaps),
    Item("table", "holistic-1", "A_N of every method, classes", holistic.class_incremental, ("cil",)),
    Item("table", "holistic-2", "strategies, with published figures", strategies.fine_tuning_strategies, ("cil",)),
    Item("table", "holistic-3", "A_N of every method, domains", holistic.domain_incremental, ("dil",)),
    Item("table", "holistic-4", "what each stage adds", holistic.ablation, _SHARED),
    Item("table", "ablation", "what each released mechanism adds to ode", ablation.released_mechanisms),
    Item("table", "certificates", "certified folds, barriers and losses over streams of ode", certified.over_streams),
    Item("table", "metrics", "every metric, with forgetting and forward transfer", comparison.all_metrics),
    Item("figure", "ode-m-2", "radar by task, shortest streams", lambda s: per_task.radar(s, s.shortest)),
    Item("figure", "ode-m-5", "γ along the trajectories", histograms.gamma),
    Item("figure", "ode-m-6", "alignment along the trajectories", histograms.alignment),
    Item("figure", "ode-m-7", "radar by task, longest streams", lambda s: per_task.radar(s, s.longest)),
    Item("figure", "ode-m-8", "radar by task, random utilities", lambda s: per_task.radar(s, s.longest, "random")),
    Item("figure", "opcm-2", "what is held, by the number of tasks", memory.memory_by_tasks),
    Item("figure", "opcm-4", "cosine of task vectors, shortest", lambda s: similarity.cosine_map(s, s.shortest)),
    Item("figure", "opcm-5", "ACC over the number of tasks", curves.accuracy_over_tasks),
    Item("figure", "opcm-6", "ACC over α, longest streams", curves.alpha_sweep),
    Item("figure", "opcm-7", "λ(t) beside √t", curves.adaptive_scaling),
    Item("figure", "opcm-8", "base and experts as bars", per_task.end_bars),
    Item("figure", "opcm-9", "cosine of task vectors, all", lambda s: similarity.cosine_map(s, len(s.suite.tasks))),
    Item("figure", "opcm-12", "accuracy matrix", similarity.accuracy_matrices),
    Item("figure", "opcm-13", "ACC over λ and over α beside each other", curves.both_sweeps),
    Item("figure", "opcm-14", "ACC over λ by stream length", curves.scaling_by_length),
    Item("figure", "opcm-15", "ACC over α by stream length", curves.alpha_by_length),
    Item("figure", "holistic-1", "between two models: line and Fisher", interpolation.line_against_fisher, _SHARED),
    Item("figure", "holistic-2", "the line: standard and tangent", interpolation.along_the_line, _SHARED),
    Item("figure", "holistic-3", "features moved by each merge", mismatch.mismatch_by_task, _SHARED),
    Item("figure", "holistic-4", "Fisher: standard and tangent", interpolation.along_fisher, _SHARED),
    *(
        Item("figure", f"holistic-{5 + k}", "features of a class", partial(before_and_after, number=k), _SHARED)
        for k in range(FIGURES)
    ),
)


def choose(kind: Kind, text: str, protocol: str = "task") -> list[Item]:
    """The items that a comma-separated list names; `all`, or all of a paper, are those for suites of that protocol."""
    known = {item.name: item for item in ITEMS if item.kind == kind}
    chosen: list[Item] = []
    for word in (w.strip().lower() for w in text.split(",")):
        if word == "all" or word in PAPERS:
            fitting = [i for n, i in known.items() if protocol in i.protocols and (word == "all" or n.startswith(word))]
            if fitting:
                chosen += fitting
                continue
            word = next(n for n in known if n.startswith(word))
        name = next((n for n in (word, f"ode-m-{word}", f"opcm-{word}") if n in known), None)
        if name is None:
            raise OptionError(f"there is no {kind} '{word}'; {suggest(word, [*known, 'all'])}")
        if protocol not in known[name].protocols:
            wanted = " or ".join(known[name].protocols)
            raise OptionError(f"{kind} {name} is about suites of protocol {wanted}; this one's is {protocol}")
        chosen.append(known[name])
    return chosen
