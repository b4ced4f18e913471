"""The rows of a run as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mergeway.bench.outcome import RunJson, RunRow

_COLUMNS = ("rule", "tasks", "ACC", "BWT", "gap", "gradients", "seconds")
BELOW = "↓"  # beside a row that ends below the base


def print_run(result: RunJson, orders: int, as_json: bool, losses: bool = False) -> None:
    """The rules best first, and what base and experts reach below them; with the losses, for language models."""
    from mergeway.cli.display import console, print_json, table

    if as_json:
        print_json(result)
        return
    rows = sorted(result["rows"], key=lambda row: (row["tasks"], -row["acc"]))
    columns, cells, ends = _COLUMNS, [_cells(row) for row in rows], ""
    if losses:
        columns = (*_COLUMNS[:5], "loss", "loss gap", *_COLUMNS[5:])
        shown = [(f"{row['loss']:.3f}", f"{row['loss_gap']:.0f} %") for row in rows]
        cells = [(*cell[:5], *pair, *cell[5:]) for cell, pair in zip(cells, shown, strict=True)]
        ends = f"; losses {result['base_loss']:.3f} and {result['experts_loss']:.3f}"
    console().print(table(columns, cells, numbers=columns[1:]))
    console().print(f"\nbase {result['base']:.1f}, experts {result['experts']:.1f}{ends}; {_counted(orders)}")


def print_between_ends(rows: Sequence[RunRow], base: float, experts: float, orders: int) -> None:
    """The rules between the base, which is the first row, and the experts, the last; those below the base are marked."""
    from mergeway.cli.display import console, table

    def end(name: str, accuracy: float, gap: str) -> tuple[str, ...]:
        return (name, "", f"{accuracy:.1f}      ", "", gap, "", "", "")

    rules = [(*_cells(row), BELOW if row["gap"] < 0 else "") for row in sorted(rows, key=lambda row: row["acc"])]
    cells = [end("base", base, "0 %"), *rules, end("experts", experts, "100 %")]
    console().print(table((*_COLUMNS, ""), cells, numbers=_COLUMNS[1:]))
    console().print(f"\n{_counted(orders)}; {BELOW} below the base")


def _cells(row: RunRow) -> tuple[str, ...]:
    return (
        row["rule"],
        str(row["tasks"]),
        f"{row['acc']:.1f} ± {row['acc_std']:.1f}",
        f"{row['bwt']:.1f} ± {row['bwt_std']:.1f}",
        f"{row['gap']:.0f} %",
        f"{row['gradients']:.0f}",
        f"{row['seconds']:.1f}",
    )


def _counted(orders: int) -> str:
    return f"mean ± std over {orders} order{'' if orders == 1 else 's'}; gradients and seconds per stream"
