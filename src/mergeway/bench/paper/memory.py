"""OPCM Figure 2: what has to be held to merge so many tasks, all at once or one after another.

Deviates: bytes of the tensors themselves, counted after every fold; what a process needs beside them is in benchmarks/constant.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mergeway.bench.paper import style
from mergeway.bench.paper.study import Study
from mergeway.bench.protocol import parse_rule
from mergeway.checkpoint import Checkpoint, open_checkpoint
from mergeway.fold.merge import fold_steps
from mergeway.rules import Rule, make

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AT_ONCE = "all at once"


def memory_by_tasks(study: Study) -> Figure:
    """Bytes held over the number of tasks: the base with all experts, or the base, one arrival and the rule's state."""
    held = bytes_by_tasks(study)
    figure = style.new_figure(5.4, 3.4)
    axes = figure.add_subplot()
    # Rules that hold the same share a line, which would hide the others.
    lines: dict[tuple[float, ...], list[str]] = {}
    for name, sizes in held.items():
        lines.setdefault(tuple(size / 1e6 for size in sizes), []).append(name)
    for number, (sizes, names) in enumerate(lines.items()):
        axes.plot(range(1, len(sizes) + 1), sizes, label="\n".join(names), **style.line(number))
    axes.set_xticks(range(1, study.longest + 1))
    axes.set_xlabel("tasks")
    axes.set_ylabel("tensors held, MB")
    axes.set_ylim(bottom=0)
    axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    return figure


def bytes_by_tasks(study: Study) -> dict[str, list[int]]:
    """For merging all at once, and for each data-free rule of the figure, the bytes held at 1, 2, … tasks."""
    experts = [t.expert for t in study.suite.tasks[: study.longest]]
    base = open_checkpoint(study.suite.base)
    sizes = [_size(open_checkpoint(expert, base)) for expert in experts]
    found = {AT_ONCE: [_size(base) + sum(sizes[:k]) for k in range(1, len(sizes) + 1)]}
    free = [rule for rule in study.featured if not _with_defaults(rule).needs] or ["opcm"]
    for rule in free:
        states = [_size(step.state) for step in fold_steps(study.suite.base, experts, _with_defaults(rule))]
        found[rule] = [_size(base) + arrival + state for arrival, state in zip(sizes, states, strict=True)]
    return found


def _with_defaults(rule: str) -> Rule:
    return make(*parse_rule(rule)[:2])


def _size(checkpoint: Checkpoint) -> int:
    return sum(info.nbytes for info in checkpoint.infos.values())
