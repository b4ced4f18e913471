"""How a journal record is printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from mergeway.checkpoint.source import JsonObject
    from mergeway.trunk.journal import Record


def print_record(record: Record, as_json: bool) -> None:
    """What a change of a trunk came to."""
    from mergeway.cli.display import console, print_json

    if as_json:
        print_json(asdict(record))
        return
    out = console()
    out.print(headline(record))
    for name, value in [*lines_of(record), ("head", record.hash)]:
        out.print(f"    {name:<8} {value}", markup=False)
    if checks := record.details.get("checks"):
        out.print(checks_table(checks))


def checks_table(checks: Sequence[JsonObject]) -> Table:
    """What each task was worth before a fold and after it, in percent."""
    from mergeway.cli.display import table

    columns = ("task", "measure", "samples", "before", "after", "change", "arrival")
    rows = [
        (
            row["task"],
            row["measure"],
            str(row["samples"]),
            f"{row['before']:.2f}",
            f"{row['after']:.2f}",
            f"{row['after'] - row['before']:+.2f}",
            f"{row['arrival']:.2f}" if "arrival" in row else "",
        )
        for row in checks
    ]
    return table(columns, rows, numbers=columns[2:])


def headline(record: Record) -> str:
    """Step, kind and what it was about, as rich markup."""
    from rich.markup import escape

    what = {"rollback": f"to step {record.details.get('to')}", "init": str(record.details.get("rule"))}.get(
        record.kind, record.task or ""
    )
    return f"[bold yellow]step {record.step}[/bold yellow] {escape(record.kind)} [bold]{escape(what)}[/bold]"


def lines_of(record: Record) -> list[tuple[str, str]]:
    """The facts below the headline: name and value."""
    from mergeway.cli.display import short

    lines: list[tuple[str, str]] = [("date", record.time.replace("T", " "))]
    if record.source:
        lines.append(("from", f"{record.source} ({short(record.digest)})"))
    if record.weight is not None:
        total = record.stream.get("total")
        share = f" of {total:g}" if isinstance(total, int | float) and record.kind == "add" else ""
        lines.append(("weight", f"{record.weight:g}{share}"))
    if message := record.details.get("message"):
        lines.append(("message", message))
    lines.append(("model", short(record.result)))
    if checks := record.details.get("checks"):
        lines.append(("accuracy", ", ".join(f"{row['task']} {row['after']:.1f}" for row in checks)))
    facts = record.details.get("facts", {})
    if record.kind == "add" and facts.get("fell_back"):
        lines.append(
            (
                "note",
                f"fell back to its start: teaching took the loss on held-back samples from {facts['held_start']:.4g} to {facts['held_end']:.4g}",
            )
        )
    return lines
