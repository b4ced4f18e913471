"""The commands about steps: diff, tag, prune, replay."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mergeway.cli import completion
from mergeway.cli.app import DEPLOY, FOLD, app, read_options
from mergeway.cli.computing import computes
from mergeway.cli.options import BaseAt, Json, NoWait, Set, TrunkPath

if TYPE_CHECKING:
    from mergeway.model.compute import Compute

SHOWN = 20  # tensors in the table, unless all are asked for


@app.command(rich_help_panel=DEPLOY)
def diff(
    trunk: TrunkPath,
    first: Annotated[str, typer.Argument(metavar="A", help="A step, by number or tag.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another.")],
    everything: Annotated[
        bool, typer.Option("--all", help=f"Show every tensor, not only the {SHOWN} that moved farthest.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what lies between two steps: which tensors moved how far, and what became of accuracies."""
    from mergeway.cli.display import console, print_json, table
    from mergeway.trunk import Trunk
    from mergeway.trunk.diff import diff as compare

    found = compare(Trunk.open(trunk), first, second)
    if as_json:
        print_json(asdict(found))
        return
    shown = found.tensors if everything else found.tensors[:SHOWN]
    rows = [
        (r.name, "×".join(map(str, r.shape)), f"{r.distance:.4g}", _share(r.relative), _plain(r.cosine, "{:.3f}"))
        for r in [*shown, found.whole]
    ]
    columns = ("tensor", "shape", "distance", "of A", "cosine")
    out = console()
    out.print(table(columns, rows, numbers=columns[1:]))
    if len(shown) < len(found.tensors):
        out.print(f"and {len(found.tensors) - len(shown)} that moved less; --all shows them", markup=False)
    if found.accuracies:
        cells = [
            (task, _plain(a, "{:.2f}"), _plain(b, "{:.2f}"), "" if a is None or b is None else f"{b - a:+.2f}")
            for task, (a, b) in found.accuracies.items()
        ]
        columns = ("task", f"step {found.first}", f"step {found.second}", "change")
        out.print(table(columns, cells, numbers=columns[1:]))


@app.command(rich_help_panel=DEPLOY)
def tag(
    trunk: TrunkPath,
    step: Annotated[
        str | None, typer.Argument(metavar="STEP", help="The step, by number or another tag.", show_default=False)
    ] = None,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Its name.", show_default=False)] = None,
    remove: Annotated[
        str | None, typer.Option("--remove", metavar="NAME", help="Take a name away again.", show_default=False)
    ] = None,
    no_wait: NoWait = False,
    as_json: Json = False,
) -> None:
    """Name a step, so that the name may stand for it and its snapshot is kept; without a step, show the tags."""
    from mergeway.cli.display import console, print_json, table
    from mergeway.errors import MergewayError, OptionError, TrunkError
    from mergeway.trunk import Trunk

    opened = Trunk.open(trunk)
    if (step is None) != (name is None) or (step is not None and remove is not None):
        raise OptionError("tag takes a STEP and a NAME, or --remove NAME, or neither to show the tags")
    if step is not None and name is not None:
        opened.tag(step, name, wait=not no_wait)
    if remove is not None:
        opened.untag(remove, wait=not no_wait)
    try:
        tags = opened.tags()
    except MergewayError as problem:
        if step is None and remove is None:
            raise
        raise TrunkError(f"{trunk}: the new list of tags is written, but cannot be shown: {problem}") from None
    if as_json:
        print_json(tags)
        return
    if not tags:
        console().print("there are no tags", markup=False)
        return
    console().print(table(("tag", "step"), [(tag, str(at)) for tag, at in tags.items()], numbers=("step",)))


@app.command(rich_help_panel=DEPLOY)
def prune(
    trunk: TrunkPath,
    keep: Annotated[
        int | None,
        typer.Option("--keep", metavar="N", help="How many to keep; by default as 'init' said.", show_default=False),
    ] = None,
    no_wait: NoWait = False,
    as_json: Json = False,
) -> None:
    """Drop snapshots: all but the last N, the deployed one and those with a tag."""
    from mergeway.cli.display import console, print_json
    from mergeway.cli.history import size_text
    from mergeway.trunk import Trunk

    done = Trunk.open(trunk).prune(keep, wait=not no_wait)
    if as_json:
        print_json(asdict(done))
        return
    steps = ", ".join(map(str, done.steps))
    summary = f"dropped the snapshots of steps {steps}, {size_text(done.bytes)}" if done.steps else "nothing to drop"
    console().print(summary, markup=False)


@app.command(rich_help_panel=FOLD)
@computes
def replay(
    trunk: TrunkPath,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The directory of the new trunk.")],
    rule: Annotated[str, typer.Option("--rule", help="The rule of the new trunk.", autocompletion=completion.rules)],
    options: Set = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="TASK=DATA",
            help="Data of a task, for rules that need it; by default what the trunk remembers.",
            show_default=False,
        ),
    ] = None,
    head: Annotated[
        list[str] | None,
        typer.Option("--head", metavar="TASK=FILE", help="The frozen head that goes with it.", show_default=False),
    ] = None,
    base: BaseAt = None,
    as_json: Json = False,
    *,
    compute: Compute,
) -> None:
    """Fold the same arrivals by another rule, into a new trunk; they must still exist."""
    from mergeway.cli.arrivals import read_pairs
    from mergeway.cli.display import console, print_json
    from mergeway.errors import MergewayError, TrunkError
    from mergeway.rules import make
    from mergeway.trunk import Trunk
    from mergeway.trunk.replay import replay as fold_again

    chosen = make(rule, read_options(options))
    opened = Trunk.open(trunk, compute=compute, base=base)
    replayed = fold_again(opened, out, chosen, data=read_pairs("--data", data), head=read_pairs("--head", head))
    try:
        records = replayed.log()
    except MergewayError as problem:
        raise TrunkError(f"{out}: is written, but cannot be read: {problem}") from None
    if as_json:
        print_json([asdict(r) for r in records])
        return
    console().print(
        f"{len(records) - 1} arrivals of {trunk} folded again into {out} with rule {chosen.name}", markup=False
    )


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


def _plain(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)
