"""`mergeway path`: one trajectory between two checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mergeway.cli import completion
from mergeway.cli.app import COMPARE, app, read_options
from mergeway.cli.computing import computes
from mergeway.cli.objectives import ObjectiveOption
from mergeway.cli.options import Json, Set

if TYPE_CHECKING:
    from mergeway.model.compute import Compute


@app.command(rich_help_panel=COMPARE)
@computes
def path(
    start: Annotated[str, typer.Argument(metavar="A", help="Where the trajectory starts: a checkpoint.")],
    target: Annotated[str, typer.Argument(metavar="B", help="Where it leads: a checkpoint of the same model.")],
    suite: Annotated[
        str | None,
        typer.Option(
            "--suite",
            help="A suite of which A and B are experts.",
            show_default=False,
            autocompletion=completion.suites,
        ),
    ] = None,
    objective: ObjectiveOption = None,
    points: Annotated[int, typer.Option("--points", help="How many operating times from 0 to 1.")] = 11,
    options: Set = None,
    as_json: Json = False,
    *,
    compute: Compute,
) -> None:
    """Sweep the trajectory between two checkpoints: loss, damping and, on a suite, accuracy at each operating time."""
    from mergeway.bench.sweep import sweep
    from mergeway.cli.display import console, print_json, table
    from mergeway.cli.objectives import find_suite, import_function
    from mergeway.errors import OptionError

    if bool(suite) == bool(objective):
        raise OptionError("path needs an objective: give either --suite or --objective")
    rows = sweep(
        start,
        target,
        find_suite(suite, compute) if suite else None,
        import_function(objective, compute) if objective else None,
        points,
        read_options(options),
    )
    if as_json:
        print_json(rows)
        return
    names = list(rows[0]["accuracies"])
    cells = [
        (
            f"{r['time']:.2f}",
            f"{r['loss']:.4f}",
            f"{r['gamma']:.2f}",
            f"{r['alignment']:.3f}",
            *(f"{r['accuracies'][n]:.1f}" for n in names),
        )
        for r in rows
    ]
    columns = ("t", "loss", "γ", "alignment", *names)
    console().print(table(columns, cells, numbers=columns))
