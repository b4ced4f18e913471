"""`mergeway merge`: a whole stream in one go."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mergeway.cli import completion
from mergeway.cli.app import FOLD, app, command_line, read_options
from mergeway.cli.computing import computes
from mergeway.cli.objectives import ObjectiveOption
from mergeway.cli.options import AllowPickle, Force, Heads, Json, RuleName, Set, ShardSize, Threads

if TYPE_CHECKING:
    from mergeway.fold.merge import MergedDirectory
    from mergeway.model.compute import Compute
    from mergeway.rules import Rule


Base = Annotated[str, typer.Argument(metavar="BASE", help="The checkpoint all arrivals were tuned from.")]
Arrivals = Annotated[
    list[str], typer.Argument(metavar="ARRIVAL", help="Checkpoints or adapters, in the order they arrive.")
]
Out = Annotated[Path, typer.Option("--out", help="The model directory to write.")]
Weights = Annotated[
    str | None,
    typer.Option("--weights", metavar="1,2,..", help="A utility weight for each arrival.", show_default=False),
]
SuiteOption = Annotated[
    str | None,
    typer.Option(
        "--suite",
        help="A suite whose tasks are the arrivals; their data calibrates the rule.",
        show_default=False,
        autocompletion=completion.suites,
    ),
]


@app.command(rich_help_panel=FOLD)
@computes
def merge(
    base: Base,
    arrivals: Arrivals,
    out: Out,
    rule: RuleName = "average",
    options: Set = None,
    weights: Weights = None,
    suite: SuiteOption = None,
    objective: ObjectiveOption = None,
    heads: Heads = None,
    shard_size: ShardSize = "5GB",
    threads: Threads = None,
    allow_pickle: AllowPickle = False,
    force: Force = False,
    as_json: Json = False,
    *,
    compute: Compute,
) -> None:
    """Fold a whole stream of checkpoints into a base and write the merged model."""
    from mergeway.checkpoint.writer import read_size
    from mergeway.cli.display import print_json, progress
    from mergeway.cli.objectives import find_objective
    from mergeway.fold.merge import merge_into
    from mergeway.rules import make

    chosen = make(rule, read_options(options))
    loss = find_objective(suite, objective, arrivals, compute)
    with progress() as bar:
        done = merge_into(
            out,
            base,
            arrivals,
            chosen,
            read_weights(weights),
            loss,
            heads=heads,
            shard_size=read_size(shard_size),
            threads=threads,
            compute=compute,
            allow_pickle=allow_pickle,
            force=force,
            command=command_line(),
            progress=bar,
        )
    if as_json:
        print_json(as_object(done, chosen))
        return
    print_merged(done, chosen)


def as_object(done: MergedDirectory, rule: Rule) -> dict[str, object]:
    """A merge as `merge --json` prints it."""
    return {
        "out": str(done.out),
        "rule": rule.name,
        "options": rule.options(),
        "base": {"source": done.base.checkpoint.source, "digest": done.base.seen.digest},
        "arrivals": [
            {"task": a.task, "source": a.checkpoint.source, "digest": a.seen.digest, "weight": a.weight}
            for a in done.arrivals
        ],
        "facts": dict(done.at.facts),
    }


def print_merged(done: MergedDirectory, rule: Rule) -> None:
    """A merge as a table of its arrivals."""
    from mergeway.cli.display import console, short, table

    rows = [(a.task, a.checkpoint.source, f"{a.weight:g}", short(a.seen.digest)) for a in done.arrivals]
    console().print(table(("task", "arrival", "weight", "digest"), rows, numbers=("weight",)))
    console().print(f"merged by {rule.name} into {done.out}", markup=False)


def read_weights(text: str | None) -> list[float] | None:
    """Weights from a comma-separated list."""
    from mergeway.errors import OptionError

    if text is None:
        return None
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise OptionError(f"--weights {text!r}: expected numbers with commas between them, such as 1,2,0.5") from None
