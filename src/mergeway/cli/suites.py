"""`mergeway suites`: the suites that come with the package; building one anew, checking one of your own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mergeway.cli.app import Json, app

suites_app = typer.Typer(invoke_without_command=True, no_args_is_help=False)
app.add_typer(suites_app, name="suites")


@suites_app.callback()
def suites(context: typer.Context, as_json: Json = False) -> None:
    """List the suites that come with the package; build one anew, or check one of your own."""
    if context.invoked_subcommand is not None:
        return
    from mergeway.cli.display import console, print_json, table

    rows = describe_suites()
    if as_json:
        print_json(rows)
        return
    for row in rows:
        console().print(f"{row['suite']}: {row['kind']}, {row['megabytes']:.1f} MB\n")
        cells = [
            (t["task"], str(t["classes"]), str(t["train"]), str(t["test"]), f"{t['base']:.1f}", f"{t['expert']:.1f}")
            for t in row["tasks"]
        ]
        columns = ("task", "classes", "train", "test", "base %", "expert %")
        console().print(table(columns, cells, numbers=columns[1:]))


@suites_app.command()
def build(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An embedded suite; 'mergeway suites' lists them.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where to write it. Default: a directory of its name.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train an embedded suite anew from its sources; one that was interrupted goes on where it stopped."""
    from mergeway.cli.display import console, print_json, progress
    from mergeway.suites import build_suite, embedded

    embedded(name)
    out = out or Path(name)
    with progress() as bar:
        made = build_suite(name, out, bar)
    if as_json:
        print_json(made)
        return
    console().print(f"suite {name} with {len(made['tasks'])} tasks built in {out}", markup=False)


@suites_app.command()
def check(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A directory with a suite.json.")],
    as_json: Json = False,
) -> None:
    """Read all of a suite: base, experts, heads and data fit each other, every value is finite."""
    from mergeway.cli.display import console, print_json, table
    from mergeway.suites import check_suite

    rows = check_suite(directory)
    if as_json:
        print_json({"suite": str(directory), "tasks": rows})
        return
    columns = ("task", "classes", "train", "test")
    cells = [[str(row[c]) for c in columns] for row in rows]
    console().print(table(columns, cells, numbers=columns[1:]))
    console().print(f"{directory}: {len(rows)} tasks, all fit the base", markup=False)


def describe_suites() -> list[dict[str, Any]]:
    """Every embedded suite as plain data, from its description and files; no weights are read."""
    import json

    import numpy as np

    from mergeway.suites.embedded import EMBEDDED, embedded

    rows = []
    for name in EMBEDDED:
        path = embedded(name)
        said = json.loads((path / "suite.json").read_text(encoding="utf-8"))
        tasks = []
        for task in said["tasks"]:
            with np.load(path / task["data"]) as data:
                train, test = len(data["y_train"]), len(data["y_test"])
            tasks.append(
                {
                    "task": task["name"],
                    "classes": task["classes"],
                    "train": train,
                    "test": test,
                    "base": task["zero_shot"],
                    "expert": task["expert_accuracy"],
                }
            )
        size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
        rows.append(
            {"suite": name, "kind": said["kind"], "path": str(path), "megabytes": round(size / 1e6, 2), "tasks": tasks}
        )
    return rows
