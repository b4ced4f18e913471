"""`mergeway demo`: the main job on the embedded suite."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mergeway.cli.app import COMPARE, Json, app


@app.command(rich_help_panel=COMPARE)
def demo(
    out: Annotated[Path, typer.Option("--out", help="Where the run and its report go.")] = Path("mergeway-demo"),
    quick: Annotated[bool, typer.Option("--quick", help="Five rules, four tasks, one order.")] = False,
    as_json: Json = False,
) -> None:
    """Fold eight real experts by every rule in three orders, compare them, and write an interactive report."""
    from mergeway.bench.demo import run_demo
    from mergeway.cli.bench import print_rows
    from mergeway.cli.display import console, print_json, progress

    with progress() as bar:
        run, report = run_demo(out, quick, bar)
    result = run.as_json()
    if as_json:
        print_json({**result, "report": str(report)})
        return
    print_rows(result, run.description["orders"])
    console().print(f"\nreport: {report.absolute()}", markup=False)
