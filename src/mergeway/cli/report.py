"""`mergeway report`: a run or a trunk as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mergeway.cli import completion
from mergeway.cli.app import COMPARE, app
from mergeway.cli.options import Json


@app.command(rich_help_panel=COMPARE)
def report(
    source: Annotated[Path, typer.Argument(metavar="RUN|TRUNK", help="What 'bench --out' wrote, or a trunk.")],
    out: Annotated[Path, typer.Option("--out", help="The file to write; an earlier report there is replaced.")] = Path(
        "report.html"
    ),
    suite: Annotated[
        str | None,
        typer.Option(
            "--suite",
            help="The suite of the run: record a sweep of its last trajectory for the operating-point explorer.",
            show_default=False,
            autocompletion=completion.suites,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write a run or a trunk as one interactive HTML file that needs no network."""
    from mergeway.bench.report import read_run, read_sweep, record_sweep, run_data, trunk_data, write_page
    from mergeway.cli.display import console, print_json, progress
    from mergeway.cli.objectives import find_suite
    from mergeway.errors import OptionError
    from mergeway.trunk import Trunk
    from mergeway.trunk.remote import is_trunk

    with progress() as bar:
        if (source / "run.json").exists():
            run = read_run(source)
            if suite:
                found = find_suite(suite)
                found.tests = run.description.get("tests")  # judged as the run was
                record_sweep(found, run, source, progress=bar)
            data = run_data(run, read_sweep(source))
        elif is_trunk(source):
            if suite:
                raise OptionError("--suite: a trunk's report needs none; leave it out")
            data = trunk_data(Trunk.open(source), bar)
        else:
            raise OptionError(f"{source}: neither a run (no run.json) nor a trunk (no journal.jsonl)")
        write_page(data, out)
    if as_json:
        print_json({"kind": data["kind"], "report": str(out)})
        return
    console().print(f"{data['kind']} {data['title']} reported in {out}", markup=False)
