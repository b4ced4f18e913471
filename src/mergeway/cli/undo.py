"""The commands that take something back, or put it right: remove, rollback, relocate."""

from __future__ import annotations

from typing import Annotated

import typer

from mergeway.cli import completion
from mergeway.cli.app import FOLD, app
from mergeway.cli.options import AllowPickle, BaseAt, Json, NoWait, StepArgument, Threads, TrunkPath
from mergeway.cli.records import print_record


@app.command(rich_help_panel=FOLD)
def remove(
    trunk: TrunkPath,
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK", help="The name of the arrival to take out.", autocompletion=completion.trunk_tasks
        ),
    ],
    source: Annotated[str, typer.Option("--from", metavar="REF", help="The checkpoint that was folded in as TASK.")],
    no_wait: NoWait = False,
    base: BaseAt = None,
    threads: Threads = None,
    allow_pickle: AllowPickle = False,
    as_json: Json = False,
) -> None:
    """Take an arrival out again, for rules whose state is a sum."""
    from mergeway.cli.display import progress
    from mergeway.trunk import Trunk

    with progress() as bar:
        opened = Trunk.open(trunk, threads=threads, progress=bar, base=base)
        record = opened.remove(task, source, wait=not no_wait, allow_pickle=allow_pickle)
    print_record(record, as_json)


@app.command(rich_help_panel=FOLD)
def rollback(
    trunk: TrunkPath,
    step: StepArgument,
    no_wait: NoWait = False,
    as_json: Json = False,
) -> None:
    """Deploy the model of an earlier step again; the journal keeps both."""
    from mergeway.cli.display import progress
    from mergeway.trunk import Trunk

    with progress() as bar:
        record = Trunk.open(trunk, progress=bar).rollback(step, wait=not no_wait)
    print_record(record, as_json)


@app.command(rich_help_panel=FOLD)
def relocate(
    trunk: TrunkPath,
    base: Annotated[str, typer.Option("--base", metavar="REF", help="Where the base is now.")],
    no_wait: NoWait = False,
    as_json: Json = False,
) -> None:
    """Tell a trunk where its base is now."""
    from mergeway.cli.display import console, print_json, progress
    from mergeway.trunk import Trunk

    with progress() as bar:
        opened = Trunk.open(trunk, progress=bar)
        now = opened.relocate(base, wait=not no_wait)
    if as_json:
        print_json({"trunk": str(trunk), "base": now, "digest": opened.base_digest})
        return
    console().print(f"the base of {trunk} is at {now}", markup=False)
