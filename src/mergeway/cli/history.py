"""The commands that look at a trunk: log, show, memory, verify."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from mergeway.cli.app import DEPLOY, app
from mergeway.cli.options import BaseAt, Json, Threads, TrunkPath
from mergeway.cli.records import checks_table, course_table, headline, lines_of
from mergeway.core.printed import printable
from mergeway.errors import OptionError

if TYPE_CHECKING:
    from mergeway.trunk import TrunkView


SHOWN = 20  # records, or arrivals, unless all are asked for


@app.command(rich_help_panel=DEPLOY)
def log(
    trunk: TrunkPath,
    last: Annotated[
        int | None,
        typer.Option("--last", metavar="N", help=f"How many of the newest steps; by default {SHOWN}, as JSON all."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every step.")] = False,
    as_json: Json = False,
) -> None:
    """Show the history, newest first."""
    from mergeway.cli.display import console, print_json
    from mergeway.trunk import Trunk

    if last is not None and (last < 1 or everything):
        raise OptionError("--last takes a number of steps, at least 1, and not together with --all")
    opened = Trunk.open(trunk)
    records, tags = opened.log(last or (None if everything or as_json else SHOWN)), tags_by_step(opened)
    if as_json:
        print_json([asdict(r) for r in records])
        return
    out = console()
    for record in reversed(records):
        marks = [m for m, there in (("deployed", record is records[-1]), ("kept", opened.keeps(record))) if there]
        marks += [f"tag {name}" for name in tags.get(record.step, [])]
        out.print(headline(record) + (f"  [cyan]({', '.join(marks)})[/cyan]" if marks else ""))
        for name, value in lines_of(record):
            out.print(f"    {name:<8} {value}", style="dim" if name in ("date", "model") else "", markup=False)
        out.print()
    if drawn := course_table(records):
        out.print(drawn)
    _print_older(records[0].step, "step")


def _print_older(count: int, what: str) -> None:
    """How many were left out."""
    from mergeway.cli.display import console

    if count > 0:
        console().print(f"and {count} older {what}{'s' if count > 1 else ''}; --all shows them", markup=False)


@app.command(rich_help_panel=DEPLOY)
def show(
    trunk: TrunkPath,
    step: Annotated[
        str | None,
        typer.Argument(metavar="STEP", help="A step, by number or tag; by default the last.", show_default=False),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help=f"Every arrival that the model holds, not only the newest {SHOWN}.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show one step whole: what was folded, what the rule found, what the model now holds."""
    from mergeway.cli.display import console, print_json, short, table
    from mergeway.trunk import Trunk

    opened = Trunk.open(trunk)
    record = opened.record(step) if step is not None else opened.log(newest=1)[-1]
    folded = opened.folded(record.step, newest=None if everything or as_json else SHOWN)
    if as_json:
        sizes = {"bytes": opened.sizes().get(record.step), "tags": tags_by_step(opened).get(record.step, [])}
        print_json({**asdict(record), "folded": [asdict(f) for f in folded], **sizes})
        return
    out = console()
    out.print(headline(record))
    facts = [(k, f"{v:.6g}" if isinstance(v, float) else str(v)) for k, v in record.details.get("facts", {}).items()]
    rule = opened.described_rule
    settings = ", ".join(f"{k}={v}" for k, v in rule.options().items() if v is not None)
    extra = [
        ("rule", f"{rule.name}{' (' + settings + ')' if settings else ''}"),
        ("base", opened.base_ref),
        ("hash", record.hash),
        *((("tags", ", ".join(names)),) if (names := tags_by_step(opened).get(record.step)) else ()),
        *((("size", size_text(size)),) if (size := opened.sizes().get(record.step)) else ()),
        *facts,
    ]
    for name, value in [*lines_of(record), *extra]:
        out.print(f"    {name:<10} {value}", markup=False)
    if folded:
        total = float(record.stream["total"])
        rows = [
            (str(f.step), f.task, f"{f.weight:g}", f"{100 * f.weight / total:.1f} %", short(f.digest), f.source)
            for f in folded
        ]
        out.print(
            table(("step", "task", "weight", "share", "digest", "source"), rows, numbers=("step", "weight", "share"))
        )
        _print_older(int(record.stream["step"]) - len(folded), "arrival")

    if checks := record.details.get("checks"):
        out.print(checks_table(checks))


def tags_by_step(trunk: TrunkView) -> dict[int, list[str]]:
    """The tags of every step that has any."""
    found: dict[int, list[str]] = {}
    for name, step in sorted(trunk.tags().items()):
        found.setdefault(step, []).append(name)
    return found


def size_text(size: int) -> str:
    """Bytes as people write them."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size = size / 1000  # pyright: ignore[reportAssignmentType]
    return f"{size:.3g} TB"


@app.command(rich_help_panel=DEPLOY)
def memory(trunk: TrunkPath, as_json: Json = False) -> None:
    """Show the calibration samples that the trunk remembers: tasks, samples, the arrivals' answers, bytes."""
    from mergeway.cli.display import console, print_json, table
    from mergeway.trunk import Trunk

    held = Trunk.open(trunk).memory()
    if as_json:
        print_json(held)
        return
    if held["tasks"]:
        columns = ("task", "samples")
        written = any(row["written"] for row in held["tasks"])
        if any(row["answers"] for row in held["tasks"]):
            columns = ("task", "samples", "copies", "answers", *(["written"] if written else []))
        rows = [tuple("–" if row[c] is None else str(row[c]) for c in columns) for row in held["tasks"]]
        console().print(table(columns, rows, numbers=columns[1:4]))
    shared = "by utility" if held["share"] == "utility" else "evenly"
    console().print(
        f"{held['samples']} of at most {held['size']} samples, shared {shared}, seed {held['seed']}, {held['bytes']} bytes",
        markup=False,
    )
    if held["answer_bytes"]:
        console().print(
            f"answers of {held['answer_bytes']} bytes before they are compressed, at most {held['answer_bytes_at_most']} when the memory is full",
            markup=False,
        )


@app.command(rich_help_panel=DEPLOY)
def verify(
    trunk: TrunkPath,
    against: Annotated[
        str | None,
        typer.Option(
            "--against", metavar="DIGEST", help="The head that 'add' printed, kept elsewhere.", show_default=False
        ),
    ] = None,
    base: BaseAt = None,
    threads: Threads = None,
    as_json: Json = False,
) -> int:
    """Check every byte of the trunk, and its base, against the journal."""
    import sys

    from mergeway.cli.display import console, print_json, progress
    from mergeway.trunk import Trunk

    with progress() as bar:
        opened = Trunk.open(trunk, threads=threads, progress=bar, base=base)
        problems = opened.verify(against)
    if as_json:
        print_json({"trunk": str(trunk), "intact": not problems, "problems": problems})
    else:
        for problem in problems:
            print(f"error: {printable(problem)}", file=sys.stderr)
        if not problems:
            records = opened.log()
            given = "".join(f"; the digest given is that of step {r.step}" for r in records if r.hash == against)
            console().print(
                f"{trunk}: intact, {len(records)} records, snapshots of steps {', '.join(map(str, opened.kept_steps()))}{given}",
                markup=False,
            )
    return 2 if problems else 0
