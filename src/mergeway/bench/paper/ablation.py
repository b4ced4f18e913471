"""What each mechanism of ODE-M's released code adds to `ode`: alone, and taken away from all of them. In none of the papers."""

from __future__ import annotations

from mergeway.bench.paper.study import Study
from mergeway.bench.paper.table import Entry, Table, Value

STEP = 0.05  # the same for every row, so that all make as many steps
MECHANISMS = {
    "guidance": {"guidance": "0.24"},
    "task norm": {"task_norm": "0.25"},
    "constraints": {"barrier": "constraints"},
    "backtracking": {"barrier": "backtracking"},
    "refinement": {"refine": "80"},
}
ALL = {"guidance": "0.24", "task_norm": "0.25", "barrier": "per-task", "refine": "80"}


def without(mechanism: str) -> dict[str, str]:
    """All options but those of one mechanism; the barrier consists of two."""
    left = {"constraints": "backtracking", "backtracking": "constraints"}.get(mechanism)
    return {**ALL, "barrier": left} if left else {k: v for k, v in ALL.items() if k not in MECHANISMS[mechanism]}


def as_rule(options: dict[str, str]) -> str:
    """`ode` with these options."""
    return ":".join(["ode", f"step={STEP}", *(f"{key}={value}" for key, value in options.items())])


def released_mechanisms(study: Study) -> Table:
    """ACC with one mechanism alone, against none; and without one, against all."""
    none, everything = (_reached(study, options) for options in ({}, ALL))
    rows: list[list[Entry]] = [["none: the paper's γ", none, "", "", ""]]
    for mechanism, options in MECHANISMS.items():
        alone, rest = _reached(study, options), _reached(study, without(mechanism))
        gains = (Value(alone.mean - none.mean), Value(everything.mean - rest.mean))
        rows.append([mechanism, alone, gains[0], rest, gains[1]])
    rows.append(["all", everything, Value(everything.mean - none.mean), "", ""])
    columns = ("mechanism", "ACC, alone", "gain over none", "ACC, all but it", "what it adds to the rest")
    title = f"What each released mechanism adds to ode, {study.longest} tasks of {study.suite.name}"
    note = (
        f"Mean ± std over {study.orders_in_words}; {study.samples} calibration samples; step {STEP} in every row, "
        "each mechanism as in preset=exact."
    )
    return Table("ablation", title, columns, rows, note, (1, 1 + len(MECHANISMS)))


def _reached(study: Study, options: dict[str, str]) -> Value:
    row = study.run([as_rule(options)]).rows()[0]
    return Value(row["acc"], row["acc_std"])
