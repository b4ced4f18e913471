"""What certificates say of whole streams of `ode`: as it is, with certified folds, and with a bound over the stream. In no paper."""

from __future__ import annotations

from mergeway.bench.certificates import stream_rows
from mergeway.bench.paper.study import Study, with_option
from mergeway.bench.paper.table import Entry, Table, Value

MODES = {"off": "false", "each fold": "true", "stream": "stream"}


def over_streams(study: Study) -> Table:
    """Rates of certified folds, barriers against bounds, and the task that lost most, for each way to certify."""
    rows: list[list[Entry]] = []
    for mode, certify in MODES.items():
        run = study.run([with_option(study.ode, "certify", certify)])
        found, reached = stream_rows(run)[0], run.rows()[0]
        share = 100 / found["folds"]
        kept = found["kept"]
        rows.append(
            [
                mode,
                Value(reached["acc"], reached["acc_std"]),
                Value(share * found["certified"]),
                Value(share * found["within"]),
                Value(found["barrier"], digits=4),
                Value(found["gamma"], digits=3),
                None if kept is None else Value(share * kept),
                found["worst"],
                None if found["rise"] is None else Value(found["rise"], digits=3),
            ]
        )
    columns = ("certify", "ACC", "certified", "B ≤ bound", "largest B", "least γ", "kept", "worst task", "rise")
    title = f"Certificates over streams of {study.longest} tasks of {study.suite.name}, {study.ode}"
    note = (
        f"{study.orders_in_words}, {study.samples} calibration samples. In percent of the folds: "
        "certified, the mean loss stayed under the envelope (Eq. 16); B ≤ bound, the barrier (Eq. 6) below Eq. 17; kept, every "
        "earlier task within the budget. Rise: the most that a task's test loss ended above what it was when the task was folded in."
    )
    return Table("certificates", title, columns, rows, note)
