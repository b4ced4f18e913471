"""A table: rows of text and numbers with their spread, before any format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Value:
    """A number, its standard deviation where there is one, how many digits are shown, and whether it is the best."""

    mean: float
    std: float | None = None
    digits: int = 1
    best: bool = False

    def __str__(self) -> str:
        # Adding zero turns -0.0 into 0.0.
        shown = f"{round(self.mean, self.digits) + 0.0:.{self.digits}f}"
        return shown if self.std is None else f"{shown} ± {self.std:.{self.digits}f}"


Entry = str | Value | None  # None: the suite does not have it


@dataclass(frozen=True)
class Table:
    """What is written as Markdown, CSV and LaTeX; a line stands before each of the rows in `breaks`."""

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Entry]]
    note: str = ""
    breaks: tuple[int, ...] = ()

    def texts(self) -> list[list[str]]:
        """Every cell as plain text."""
        return [["n/a" if cell is None else str(cell) for cell in row] for row in self.rows]

    def numeric(self) -> list[bool]:
        """Which columns hold numbers."""
        return [any(isinstance(row[i], Value) for row in self.rows) for i in range(len(self.columns))]


def over_orders(values: Sequence[float], digits: int = 1) -> Value:
    """Mean and standard deviation over the orders."""
    return Value(float(np.mean(values)), float(np.std(values)), digits)


def mark_best(rows: Sequence[list[Entry]]) -> list[list[Entry]]:
    """The rows with the highest number of each column marked, as shown: several where they tie, none where all are equal."""
    marked = [list(row) for row in rows]
    for i in range(len(rows[0]) if rows else 0):
        shown = {k: round(cell.mean, cell.digits) for k, row in enumerate(rows) if isinstance(cell := row[i], Value)}
        for k, value in shown.items():
            cell = rows[k][i]
            if min(shown.values()) < value == max(shown.values()) and isinstance(cell, Value):
                marked[k][i] = replace(cell, best=True)
    return marked
