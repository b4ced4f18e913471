"""`mergeway demo`: the main job on an embedded suite."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mergeway.cli.app import COMPARE, app
from mergeway.cli.options import Json


@app.command(rich_help_panel=COMPARE)
def demo(
    suite: Annotated[
        str, typer.Argument(metavar="[SUITE]", help="digits-light, or digits for experts that were trained hard.")
    ] = "digits-light",
    out: Annotated[Path, typer.Option("--out", help="Where the run and its report go.")] = Path("mergeway-demo"),
    quick: Annotated[bool, typer.Option("--quick", help="Five rules, four tasks, one order.")] = False,
    as_json: Json = False,
) -> None:
    """Fold eight real experts by every rule in three orders, compare them, and write an interactive report."""
    from mergeway.bench.demo import run_demo, takeaways
    from mergeway.cli.display import console, print_json, progress
    from mergeway.cli.rows import print_between_ends

    with progress() as bar:
        run, report = run_demo(suite, out, quick, bar)
    result = run.as_json()
    if as_json:
        print_json({**result, "report": str(report)})
        return
    print_between_ends(result["rows"], *run.ends_of(run.cells[0].order), run.description["orders"])
    console().print()
    for sentence in takeaways(result):
        console().print(sentence, markup=False)
    console().print(f"\nreport: {report.absolute()}", markup=False)
