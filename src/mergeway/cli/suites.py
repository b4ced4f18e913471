"""`mergeway suites`: the suites that go by a name; building one, cutting one from a dataset, checking one of your own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mergeway.cli.app import COMPARE, app
from mergeway.cli.computing import computes
from mergeway.cli.options import AllowCode, Json, SuiteName

if TYPE_CHECKING:
    from mergeway.model.compute import Compute

suites_app = typer.Typer(invoke_without_command=True, no_args_is_help=False)
app.add_typer(suites_app, name="suites", rich_help_panel=COMPARE)


@suites_app.callback()
def suites(context: typer.Context, as_json: Json = False) -> None:
    """List the suites that go by a name; build one, cut one from a dataset, or check one of your own."""
    if context.invoked_subcommand is not None:
        return
    from mergeway.cli.display import console, print_json, table
    from mergeway.cli.listing import describe_named, describe_suites

    rows, others = describe_suites(), describe_named()
    if as_json:
        print_json([*rows, *others])
        return
    for number, row in enumerate(rows):
        console().print(f"{chr(10) if number else ''}{row['suite']}: {row['kind']}, {row['megabytes']:.1f} MB\n")
        cells = [
            (t["task"], str(t["classes"]), str(t["train"]), str(t["test"]), f"{t['base']:.1f}", f"{t['expert']:.1f}")
            for t in row["tasks"]
        ]
        columns = ("task", "classes", "train", "test", "base %", "expert %")
        console().print(table(columns, cells, numbers=columns[1:]))
    console().print("\nMade when first asked for:\n")
    columns = ("suite", "protocol", "tasks", "base", "data")
    console().print(
        table(
            columns,
            [[str(row[c]).removeprefix("openai/") for c in columns] for row in others],
            ("tasks",),
            columns[:-1],
        )
    )


Experts = Annotated[
    Path | None,
    typer.Option("--experts", help="A directory with an expert for each task, under its name.", show_default=False),
]
Classifier = Annotated[
    str, typer.Option("--classifier", help="For cil and dil: head, the frozen head, or nearest-mean.")
]


@suites_app.command()
@computes
def build(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A suite; 'mergeway suites' lists them.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Where to write it. Default: a directory of its name.", show_default=False),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            "--data", metavar="ID", help="Another dataset of the hub for a cil or dil suite.", show_default=False
        ),
    ] = None,
    packages: Annotated[
        Path | None,
        typer.Option(
            "--packages", help="Where the packages lie that stories, smol and vit are made from.", show_default=False
        ),
    ] = None,
    experts: Experts = None,
    classifier: Classifier = "head",
    as_json: Json = False,
    *,
    compute: Compute,
) -> None:
    """Write a suite's directory: digits, stories, smol and vit are trained, the others are put together from the hub or from packages."""
    from mergeway.bench.suites import EMBEDDED, build_suite
    from mergeway.bench.suites.named import build_named
    from mergeway.bench.suites.trained import TRAINED, build_trained
    from mergeway.cli.display import console, print_json, progress

    with progress() as bar:
        if name in TRAINED:
            written = build_trained(name, out, packages, compute, bar)
        elif name in EMBEDDED:
            written = build_suite(name, out or Path(name), bar)
        else:
            written = build_named(name, out or Path(name), data, experts, classifier)
    if as_json:
        print_json(written)
        return
    where = out or ("the cache" if name in TRAINED else name)
    console().print(f"suite {name} with {len(written['tasks'])} tasks built in {where}", markup=False)


@suites_app.command()
def split(
    data: Annotated[
        str,
        typer.Argument(metavar="DATA", help="An .npz or .parquet file, a folder of images, or a dataset of the hub."),
    ],
    base: Annotated[Path, typer.Option("--base", help="The directory of a CLIP vision model.")],
    out: Annotated[Path, typer.Option("--out", help="Where to write the suite.")],
    by: Annotated[str, typer.Option("--by", help="classes, or domains for one task each.")] = "classes",
    tasks: Annotated[int, typer.Option("--tasks", help="How many tasks the classes make.")] = 5,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Shuffle the class order first.", show_default=False)
    ] = None,
    head: Annotated[
        Path | None,
        typer.Option("--head", help="The shared head. Default: class means under the base.", show_default=False),
    ] = None,
    domain: Annotated[str, typer.Option("--domain", help="The column or array that names the domain.")] = "domain",
    experts: Experts = None,
    classifier: Classifier = "head",
    as_json: Json = False,
) -> None:
    """Cut a labelled image dataset into a class- or domain-incremental suite."""
    from mergeway.bench.suites import split_suite
    from mergeway.cli.display import console, print_json

    written = split_suite(
        data,
        out,
        base,
        by=by,
        tasks=tasks,
        seed=seed,
        head=head,
        domain=domain,
        experts=experts,
        classifier=classifier,
    )
    if as_json:
        print_json(written)
        return
    protocol = written.get("protocol")
    console().print(f"suite {written['name']} ({protocol}) with {len(written['tasks'])} tasks in {out}", markup=False)


@suites_app.command()
def check(
    suite: SuiteName,
    allow_code: AllowCode = False,
    as_json: Json = False,
) -> None:
    """Read all of a suite: base, experts, heads and data fit each other, every value is finite."""
    from mergeway.bench.suites import check_suite, suite_directory
    from mergeway.cli.display import console, print_json, table
    from mergeway.model.compute import Compute

    tasks = check_suite(suite_directory(suite), Compute(allow_code=allow_code))
    if as_json:
        print_json({"suite": suite, "tasks": tasks})
        return
    columns = ("task", "classes", "train", "test")
    cells = [[str(task[c]) for c in columns] for task in tasks]
    console().print(table(columns, cells, numbers=columns[1:]))
    console().print(f"{suite}: {len(tasks)} tasks, all fit the base", markup=False)
