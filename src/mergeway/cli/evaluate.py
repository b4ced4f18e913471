"""`mergeway evaluate`: one model on the tasks of a suite, or on data of your own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mergeway.cli import completion
from mergeway.cli.app import COMPARE, app
from mergeway.cli.computing import computes
from mergeway.cli.options import AllowPickle, Json, StepOption

if TYPE_CHECKING:
    from mergeway.calibration.judge import Score
    from mergeway.checkpoint.source import JsonObject
    from mergeway.model.compute import Compute

HeadFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--head",
        metavar="TASK=FILE",
        help="A frozen head for an encoder, where the trunk keeps none; repeat for more.",
        show_default=False,
    ),
]
# What a score has, as the table calls it.
_MEASURES = {
    "accuracy": "accuracy",
    "exact": "exact match",
    "choices": "choices",
    "loss": "loss",
    "perplexity": "perplexity",
}


@app.command(rich_help_panel=COMPARE)
@computes
def evaluate(
    model: Annotated[str, typer.Argument(metavar="TRUNK|REF", help="A trunk or any checkpoint.")],
    suite: Annotated[
        str | None,
        typer.Option(
            "--suite",
            help="The suite whose test data judges it.",
            show_default=False,
            autocompletion=completion.suites,
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="TASK=DATA",
            help="Test data of a task: npz, parquet, jsonl, a folder of images, or SUITE#TASK; repeat for more.",
            show_default=False,
        ),
    ] = None,
    head: HeadFiles = None,
    step: StepOption = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base", help="The model that REF was tuned from, if REF is an adapter or a file.", show_default=False
        ),
    ] = None,
    allow_pickle: AllowPickle = False,
    as_json: Json = False,
    *,
    compute: Compute,
) -> None:
    """Measure a deployed model or a checkpoint on the tasks of a suite, or on data of your own."""
    from mergeway.cli.arrivals import read_pairs
    from mergeway.errors import OptionError
    from mergeway.fold.evaluate import evaluate as judge
    from mergeway.trunk import Trunk
    from mergeway.trunk.remote import is_trunk

    if bool(suite) == bool(data):
        raise OptionError("evaluate needs something to judge by: give either --suite or --data TASK=DATA")
    trunk = is_trunk(model)
    if trunk and base:
        raise OptionError("--base: a trunk has its own; leave it out")
    if step is not None and not trunk:
        raise OptionError(f"--step: {model} is no trunk; leave it out")
    if suite:
        _on_suite(model, suite, step, compute, as_json)
        return
    given, heads = read_pairs("--data", data), read_pairs("--head", head)
    if trunk:
        opened = Trunk.open(model, compute=compute)
        at = opened.step_of(step) if step is not None else None
        scores = opened.evaluate(given, head=heads, step=at)
    else:
        scores = judge(model, given, head=heads, base=base, compute=compute, allow_pickle=allow_pickle)
    _print_scores(model, scores, as_json)


def _print_scores(model: str, scores: dict[str, Score], as_json: bool) -> None:
    from dataclasses import asdict

    from mergeway.cli.display import console, print_json, table

    mean = sum(score.value for score in scores.values()) / len(scores)
    rows: dict[str, JsonObject] = {
        task: {k: v for k, v in asdict(score).items() if v is not None} | {"measure": score.measure}
        for task, score in scores.items()
    }
    if as_json:
        print_json({"model": model, "acc": mean, "tasks": rows})
        return
    shown = [name for name in _MEASURES if any(name in row for row in rows.values())]
    cells = [(task, str(row["samples"]), *(_cell(name, row.get(name)) for name in shown)) for task, row in rows.items()]
    if len({row["measure"] for row in rows.values()}) == 1:
        measure = next(iter(rows.values()))["measure"]
        cells.append(("mean", "", *(f"{mean:.1f}" if name == measure else "" for name in shown)))
    columns = ("task", "samples", *(_MEASURES[name] for name in shown))
    console().print(table(columns, cells, numbers=columns[1:]))


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1f}" if name in ("accuracy", "exact", "choices") else f"{value:.4g}"


def _on_suite(model: str, suite: str, step: str | None, compute: Compute, as_json: bool) -> None:
    from mergeway.checkpoint import open_checkpoint
    from mergeway.cli.display import console, print_json, table
    from mergeway.cli.objectives import find_suite
    from mergeway.core.pool import worker_pool
    from mergeway.fold.prepare import prepare_arrival, prepare_base
    from mergeway.trunk import Trunk
    from mergeway.trunk.remote import is_trunk

    found = find_suite(suite, compute)
    checkpoint = None
    if is_trunk(model):
        opened = Trunk.open(model)
        checkpoint = opened.deployed(opened.step_of(step) if step is not None else None)
    base = open_checkpoint(found.base)
    checkpoint = checkpoint or open_checkpoint(model, base)
    with worker_pool() as pool:
        arrival = prepare_arrival(prepare_base(base, pool), checkpoint, 1.0, model, pool)
    params = {name: arrival.read(name) for name in base.infos if base.infos[name].merges}
    scores = {task.name: found.accuracy(params, task.name) for task in found.tasks}
    mean = sum(scores.values()) / len(scores)
    if as_json:
        print_json({"model": model, "suite": found.name, "acc": mean, "tasks": scores})
        return
    rows = [(name, f"{score:.1f}") for name, score in scores.items()]
    console().print(table(("task", "accuracy"), [*rows, ("mean", f"{mean:.1f}")], numbers=("accuracy",)))
