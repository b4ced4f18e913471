"""OPCM's merging gap (Eq. 12-13): what a task loses to the other tasks' parts of the merged update, and its first-order form.

Deviates: Eq. 12 prints P(Δθ^(i)) inside the sum over j; the merged model it stands for (Eq. 7) has P(Δθ^(j)).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from mergeway.bench.paper.published import as_published
from mergeway.bench.paper.study import Study
from mergeway.bench.paper.table import Entry, Table, over_orders
from mergeway.bench.protocol import orders, parse_rule
from mergeway.calibration.objective import Objective
from mergeway.calibration.samples import Samples
from mergeway.checkpoint import open_checkpoint
from mergeway.checkpoint.resolve import Reference
from mergeway.core.tensors import Part
from mergeway.fold.folder import slot_name
from mergeway.fold.merge import fold_steps
from mergeway.rules import Fold, PartRule, make

ADDITIVE = ("average", "task-arithmetic", "opcm")  # rules that deploy a scaled sum, to which every arrival adds a part
Params = dict[str, Tensor]


def merging_gaps(study: Study) -> Table:
    """The gap of every task at the end of the longest streams, and its first-order form."""
    named = [rule for rule in study.rules if parse_rule(rule)[0] in ADDITIVE] or list(ADDITIVE)
    tasks = [t.name for t in study.suite.tasks[: study.longest]]
    rows: list[list[Entry]] = []
    for shown, rule in as_published(named, study.longest).items():
        streams = [_kept(study, rule, number) for number in range(study.orders)]
        for place, form in enumerate(("G, Eq. 12", "first order, Eq. 13")):
            found = np.array([[gaps[task][place] for task in tasks] for gaps in streams])
            cells = [over_orders(column, 3) for column in [*found.T, found.mean(axis=1)]]
            rows.append([shown, form, *cells])
    title = f"Merging gap of each task, streams of {study.longest} tasks of {study.suite.name}"
    note = (
        f"Loss of the merged model less that of the base with the task's own part alone; mean ± std over "
        f"{study.orders_in_words}; on {study.samples} calibration samples of all tasks together."
    )
    return Table("merging-gap", title, ("rule", "", *tasks, "mean"), rows, note, tuple(range(2, len(rows), 2)))


def _kept(study: Study, rule: str, number: int) -> dict[str, tuple[float, float]]:
    order = orders([t.name for t in study.suite.tasks[: study.longest]], number + 1)[number]
    protocol = {"rule": rule, "order": list(order), "samples": study.samples}
    name = f"merging-gap-{rule}-{study.longest}-{number}"
    return study.kept(name, protocol, lambda: gaps_of(study, rule, list(order), number))


def gaps_of(study: Study, rule: str, order: list[str], seed: int) -> dict[str, tuple[float, float]]:
    """G_i and ∇L_i(θ0)ᵀ(merged − θ0 − own part) for each task of a stream, on its calibration samples.

    The stream is folded twice, because only its end says how a part is scaled; so a single part is held at a time.
    """
    suite, chosen = study.suite, make(*parse_rule(rule)[:2])
    assert isinstance(chosen, PartRule)
    objective = suite.objective(order, size=study.samples, seed=seed)
    experts = [suite.task(name).expert for name in order]
    *_, last = fold_steps(suite.base, experts, chosen)
    checkpoint = open_checkpoint(suite.base)
    base = {n: checkpoint.read(n).float() for n, info in checkpoint.infos.items() if info.merges}
    merged = {n: last.params[n].float() for n in base}
    found: dict[str, tuple[float, float]] = {}
    for samples, part in zip(_in_order(objective, order), _parts(chosen, last.at, suite.base, experts), strict=True):
        own = {n: base[n] + part.get(n, 0) for n in base}
        gap = objective.accumulate_task(merged, samples) - objective.accumulate_task(own, samples)
        leaves = {n: t.clone().requires_grad_() for n, t in base.items()}
        objective.accumulate_task(leaves, samples)
        slopes = {n: leaf.grad for n, leaf in leaves.items()}
        first = sum(
            float((g.double() * (merged[n] - own[n]).double()).sum()) for n, g in slopes.items() if g is not None
        )
        found[samples.task] = (gap, first)
    return found


def _in_order(objective: Objective, order: list[str]) -> list[Samples]:
    by_name = {samples.task: samples for samples in objective.tasks}
    return [by_name[name] for name in order]


def _parts(rule: PartRule, end: Fold, base: Reference, experts: Sequence[Reference]) -> Iterator[Params]:
    """What each arrival adds to the update that the rule deploys at the end."""
    before: Params = {}
    for step in fold_steps(base, experts, rule):
        sums = {n: step.state.read(slot_name("sum", n)) for n in step.params if slot_name("sum", n) in step.state.infos}
        yield {n: _scaled(rule, end, n, s - before[n] if n in before else s) for n, s in sums.items()}
        before = sums


def _scaled(rule: PartRule, end: Fold, name: str, part: Tensor) -> Tensor:
    """The rule deploys a multiple of its sum, so it deploys the same multiple of a part of it."""
    return rule.update(end, Part(name, 0, part.numel()), {"sum": part}).float()
