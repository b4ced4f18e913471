"""The commands that grow a trunk: init, add."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from mergeway.cli.app import FOLD, app, read_options
from mergeway.cli.arrivals import (
    Again,
    Arrivals,
    Check,
    Copies,
    Data,
    DryRun,
    HeadFile,
    Holdout,
    Least,
    MaxDrop,
    Message,
    MomentsFile,
    NoMemory,
    TaskName,
    Weight,
    add_all,
    check_single,
    print_added,
    read_by_task,
    read_least,
    read_pairs,
)
from mergeway.cli.computing import computes
from mergeway.cli.objectives import ObjectiveOption
from mergeway.cli.options import AllowPickle, BaseAt, Heads, Json, NoWait, RuleName, Set, Threads, TrunkPath

if TYPE_CHECKING:
    from mergeway.checkpoint.source import JsonObject
    from mergeway.model.compute import Compute


@app.command(rich_help_panel=FOLD)
def init(
    trunk: TrunkPath,
    base: Annotated[str, typer.Option("--base", help="The checkpoint all arrivals were tuned from.")],
    rule: RuleName,
    options: Set = None,
    keep: Annotated[int, typer.Option("--keep", help="How many snapshots to keep for 'rollback'.")] = 2,
    memory: Annotated[
        int, typer.Option("--memory", metavar="N", help="Calibration samples to remember, of all tasks together.")
    ] = 1024,
    share: Annotated[
        str, typer.Option("--memory-share", help="How tasks share the memory: even, or utility for by their weights.")
    ] = "even",
    seed: Annotated[int, typer.Option("--memory-seed", help="Which samples are drawn.")] = 0,
    copies: Copies = None,
    top_k: Annotated[
        int,
        typer.Option("--top-k", metavar="K", help="Likeliest tokens that a language model answers with at each place."),
    ] = 32,
    heads: Heads = None,
    embed_base: Annotated[
        bool, typer.Option("--embed-base", help="Keep a copy of the base in the trunk, so that it can move alone.")
    ] = False,
    threads: Threads = None,
    allow_pickle: AllowPickle = False,
    as_json: Json = False,
) -> None:
    """Start a trunk from a base."""
    from mergeway.calibration.memory import Bounds
    from mergeway.cli.display import console, print_json, progress
    from mergeway.rules import make
    from mergeway.trunk import Trunk

    chosen = make(rule, read_options(options))
    with progress() as bar:
        created = Trunk.create(
            trunk,
            base,
            chosen,
            keep=keep,
            memory=Bounds(memory, share, seed, copies, top_k),  # pyright: ignore[reportArgumentType] - checked by Bounds
            heads=heads,
            embed_base=embed_base,
            threads=threads,
            allow_pickle=allow_pickle,
            progress=bar,
        )
    if as_json:
        print_json(asdict(created.log()[0]))
        return
    console().print(f"trunk {trunk} starts from {created.base_ref} with rule {chosen.name}", markup=False)


@app.command(rich_help_panel=FOLD)
@computes
def add(
    trunk: TrunkPath,
    arrivals: Arrivals,
    task: TaskName = None,
    weight: Weight = 1.0,
    data: Data = None,
    head: HeadFile = None,
    objective: ObjectiveOption = None,
    no_memory: NoMemory = False,
    copies: Copies = None,
    moments: MomentsFile = None,
    check: Check = None,
    max_drop: MaxDrop = None,
    least: Least = None,
    holdout: Holdout = None,
    dry_run: DryRun = False,
    message: Message = None,
    again: Again = False,
    no_wait: NoWait = False,
    base: BaseAt = None,
    threads: Threads = None,
    allow_pickle: AllowPickle = False,
    as_json: Json = False,
    *,
    compute: Compute,
) -> None:
    """Fold an arrival into the deployed model, or several, one after another."""
    from mergeway.cli.display import progress
    from mergeway.cli.objectives import import_function
    from mergeway.trunk import Trunk

    own = {"--task": task, "--moments": moments}
    check_single(arrivals, dry_run, [name for name, value in own.items() if value is not None])
    with progress() as bar:
        opened = Trunk.open(trunk, threads=threads, compute=compute, progress=bar, base=base)
        options: JsonObject = {
            "data": read_by_task(data),
            "head": read_by_task(head),
            "moments": moments,
            "objective": import_function(objective, compute) if objective else None,
            "remember": not no_memory,
            "copies": copies,
            "check": read_pairs("--check", check),
            "max_drop": max_drop,
            "at_least": read_least(least),
            "holdout": holdout,
            "dry_run": dry_run,
            "message": message,
            "again": again,
            "wait": not no_wait,
            "allow_pickle": allow_pickle,
        }
        records = add_all(opened, arrivals, task, weight, options, as_json)
    print_added(records, dry_run, as_json)
