"""How a journal record is printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from mergeway.checkpoint.source import JsonObject
    from mergeway.trunk.journal import Record

STEPS = 6  # columns of the table of accuracies; the course beside them has all
LITTLE = 0.2  # of what an arrival's answers could tell its samples apart; random pixels give up to 0.17, a task's own 0.3 to 0.95
BARS = "▁▂▃▄▅▆▇█"


def print_record(record: Record, as_json: bool) -> None:
    """What a change of a trunk came to."""
    from mergeway.cli.display import console, print_json

    if as_json:
        print_json(asdict(record))
        return
    out = console()
    out.print(headline(record))
    head = [("head", record.hash)] if record.hash else []  # a dry run commits no record
    for name, value in [*lines_of(record), *head]:
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


def course_table(records: Sequence[Record]) -> Table | None:
    """Accuracies over the steps that were judged, drawn from 0 to 100 percent; None where there is no course yet."""
    from mergeway.cli.display import table
    from mergeway.trunk.diff import judged_steps

    judged = judged_steps(records)
    if len(judged) < 2:
        return None
    shown = judged[-STEPS:]
    columns = ("accuracy", *(f"step {record.step}" for record, _ in shown), "course")
    tasks = dict.fromkeys(task for _, scores in judged for task in scores)
    rows = [
        (
            task,
            *(f"{scores[task]:.1f}" if task in scores else "" for _, scores in shown),
            "".join(_bar(scores.get(task)) for _, scores in judged),
        )
        for task in tasks
    ]
    return table(columns, rows, numbers=columns[1:-1])


def _bar(percent: float | None) -> str:
    return " " if percent is None else BARS[min(int(percent / 100 * len(BARS)), len(BARS) - 1)]


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
    if record.details.get("allow_code"):
        lines.append(("note", "the base's own code was allowed to run"))
    lines.append(("model", short(record.result)))
    if checks := record.details.get("checks"):
        lines.append(("accuracy", ", ".join(f"{row['task']} {row['after']:.1f}" for row in checks)))
    facts = record.details.get("facts", {})
    if record.kind == "add" and facts.get("fell_back"):
        lines.append(("note", _falling_back(facts)))
    elif record.kind == "add" and facts.get("kept", 1) < 1:
        lines.append(("note", _shortened(facts["kept"])))
    if record.details.get("asked", {}).get("told_apart", 1.0) < LITTLE:
        lines.append(("note", _unlike(record)))
    return lines


def _unlike(record: Record) -> str:
    share = record.details["asked"]["told_apart"]
    return f"the answers of '{record.task}' hardly depend on the input ({share:.0%} of what they could): are these samples its own?"


def _falling_back(facts: Mapping[str, float]) -> str:
    """What was deployed in place of a taught model, and why; before there was a choice it was always the mean."""
    plain = "the flat sum (iso, scaling=auto)" if facts.get("plain_flat") else "the mean"
    if facts.get("too_few"):
        return f"not taught: a task has only {facts['too_few']:.0f} samples, too few to teach and to judge by; deployed is {plain} of the updates"
    held = facts.get("held_plain", facts.get("held_mean", float("nan")))
    taught = f"on held-back samples its loss is {facts['held_end']:.4g}, and without teaching {held:.4g}"
    return f"fell back to {plain} of the updates, as the taught model is not better: {taught}"


def _shortened(kept: float) -> str:
    """Samples that were held back liked a part of the lesson best, or nothing of it."""
    if not kept:
        return "not taught: held-back samples got worse with every part of the lesson, so the start is deployed"
    return f"{kept:.3g} of the lesson is kept: held-back samples liked that best"
