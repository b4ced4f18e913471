"""The commands that change a trunk: init, add, remove, rollback, relocate."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mergeway.cli.app import FOLD, AllowPickle, BaseAt, Heads, Json, NoWait, Set, Threads, TrunkPath, app, read_options
from mergeway.cli.computing import computes
from mergeway.cli.objectives import ObjectiveOption
from mergeway.cli.records import print_record

if TYPE_CHECKING:
    from mergeway.model.compute import Compute

Copies = Annotated[
    int | None,
    typer.Option(
        "--copies",
        metavar="N",
        help="Copies of each sample that an arrival is asked about; by default more for a smaller memory.",
        show_default=False,
    ),
]


TaskName = Annotated[
    str | None,
    typer.Option("--task", help="The arrival's name; by default that of its file or directory.", show_default=False),
]
Data = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        help="The task's data for rules that need it: npz, parquet, jsonl, a folder of images, SUITE#TASK, or self:N for texts that a language model writes itself; TASK=DATA for an earlier task.",
        show_default=False,
    ),
]
HeadFile = Annotated[
    list[str] | None,
    typer.Option(
        "--head",
        help="The task's frozen head: a safetensors file with 'weight' [classes, width]; TASK=FILE for an earlier task.",
        show_default=False,
    ),
]
MomentsFile = Annotated[
    Path | None,
    typer.Option(
        "--moments",
        help="The optimiser's second moments for rules that need them; by default moments.safetensors beside the arrival.",
        show_default=False,
    ),
]


@app.command(rich_help_panel=FOLD)
def init(
    trunk: TrunkPath,
    base: Annotated[str, typer.Option("--base", help="The checkpoint all arrivals were tuned from.")],
    rule: Annotated[str, typer.Option("--rule", help="How arrivals are folded in; 'mergeway rules' lists them.")],
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
    arrival: Annotated[str, typer.Argument(metavar="ARRIVAL", help="A checkpoint or adapter tuned from the base.")],
    task: TaskName = None,
    weight: Annotated[float, typer.Option("--weight", help="The arrival's utility against the others.")] = 1.0,
    data: Data = None,
    head: HeadFile = None,
    objective: ObjectiveOption = None,
    no_memory: Annotated[
        bool, typer.Option("--no-memory", help="Keep none of the data: it has to be given again at every later add.")
    ] = False,
    copies: Copies = None,
    moments: MomentsFile = None,
    again: Annotated[bool, typer.Option("--again", help="Fold in the same weights once more.")] = False,
    no_wait: NoWait = False,
    base: BaseAt = None,
    threads: Threads = None,
    allow_pickle: AllowPickle = False,
    as_json: Json = False,
    *,
    compute: Compute,
) -> None:
    """Fold an arrival into the deployed model."""
    from mergeway.cli.display import progress
    from mergeway.cli.objectives import import_function
    from mergeway.trunk import Trunk

    with progress() as bar:
        opened = Trunk.open(trunk, threads=threads, compute=compute, progress=bar, base=base)
        record = opened.add(
            arrival,
            task,
            weight,
            data=read_by_task(data),
            head=read_by_task(head),
            moments=moments,
            objective=import_function(objective, compute) if objective else None,
            remember=not no_memory,
            copies=copies,
            again=again,
            wait=not no_wait,
            allow_pickle=allow_pickle,
        )
    print_record(record, as_json)


@app.command(rich_help_panel=FOLD)
def remove(
    trunk: TrunkPath,
    task: Annotated[str, typer.Argument(metavar="TASK", help="The name of the arrival to take out.")],
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
    step: Annotated[
        int, typer.Argument(metavar="STEP", help="The step to go back to; 'log' marks those that are kept.")
    ],
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


def read_by_task(words: list[str] | None) -> dict[str, str] | str | None:
    """DATA alone, or TASK=DATA for each of several tasks."""
    from mergeway.errors import OptionError

    if not words:
        return None
    if len(words) == 1 and "=" not in words[0].partition("#")[0]:
        return words[0]
    pairs = [word.partition("=") for word in words]
    for name, equals, value in pairs:
        if not equals or not name or not value:
            raise OptionError(f"{name!r}: with the data of several tasks, each is TASK=DATA, the arrival's too")
    return {name: value for name, _, value in pairs}
