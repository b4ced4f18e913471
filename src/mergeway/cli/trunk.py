"""The commands of a trunk: init, add, remove, log, show, verify, rollback, export."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mergeway.cli.app import AllowPickle, Force, Json, NoWait, Set, ShardSize, Threads, app, command_line, read_options
from mergeway.cli.objectives import ObjectiveOption

if TYPE_CHECKING:
    from mergeway.checkpoint.adapter import Adapter
    from mergeway.store import Record

TrunkPath = Annotated[Path, typer.Argument(metavar="TRUNK", help="The trunk's directory.")]


@app.command()
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
    heads: Annotated[
        str | None,
        typer.Option(
            "--heads",
            metavar="REGEX",
            help="Tensors that each task keeps for itself; by default those of a classifier, '' for none.",
            show_default=False,
        ),
    ] = None,
    threads: Threads = None,
    allow_pickle: AllowPickle = False,
    as_json: Json = False,
) -> None:
    """Start a trunk from a base."""
    from mergeway.cli.display import console, print_json, progress
    from mergeway.memory import Bounds
    from mergeway.rules import make
    from mergeway.trunk import Trunk

    chosen = make(rule, read_options(options))
    with progress() as bar:
        made = Trunk.create(
            trunk,
            base,
            chosen,
            keep=keep,
            memory=Bounds(memory, share, seed),  # pyright: ignore[reportArgumentType] - checked by Bounds
            heads=heads,
            threads=threads,
            allow_pickle=allow_pickle,
            progress=bar,
        )
    if as_json:
        print_json(asdict(made.log()[0]))
        return
    console().print(f"trunk {trunk} starts from {made.base_ref} with rule {chosen.name}", markup=False)


@app.command()
def add(
    trunk: TrunkPath,
    arrival: Annotated[str, typer.Argument(metavar="ARRIVAL", help="A checkpoint or adapter tuned from the base.")],
    task: Annotated[
        str | None,
        typer.Option(
            "--task", help="The arrival's name; by default that of its file or directory.", show_default=False
        ),
    ] = None,
    weight: Annotated[float, typer.Option("--weight", help="The arrival's utility against the others.")] = 1.0,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            help="The task's data for rules that need it: npz, parquet, jsonl, a folder of images, or SUITE#TASK; TASK=DATA for an earlier task.",
            show_default=False,
        ),
    ] = None,
    head: Annotated[
        list[str] | None,
        typer.Option(
            "--head",
            help="The task's frozen head: a safetensors file with 'weight' [classes, width]; TASK=FILE for an earlier task.",
            show_default=False,
        ),
    ] = None,
    objective: ObjectiveOption = None,
    no_memory: Annotated[
        bool, typer.Option("--no-memory", help="Keep none of the data: it has to be given again at every later add.")
    ] = False,
    moments: Annotated[
        Path | None,
        typer.Option(
            "--moments",
            help="The optimiser's second moments for rules that need them; by default moments.safetensors beside the arrival.",
            show_default=False,
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Fold in the same weights once more.")] = False,
    no_wait: NoWait = False,
    threads: Threads = None,
    allow_pickle: AllowPickle = False,
    as_json: Json = False,
) -> None:
    """Fold an arrival into the deployed model."""
    from mergeway.cli.display import progress
    from mergeway.cli.objectives import import_function
    from mergeway.trunk import Trunk

    with progress() as bar:
        opened = Trunk.open(trunk, threads=threads, progress=bar)
        record = opened.add(
            arrival,
            task,
            weight,
            data=read_by_task(data),
            head=read_by_task(head),
            moments=moments,
            objective=import_function(objective) if objective else None,
            remember=not no_memory,
            again=again,
            wait=not no_wait,
            allow_pickle=allow_pickle,
        )
    _print_record(record, as_json)


@app.command()
def remove(
    trunk: TrunkPath,
    task: Annotated[str, typer.Argument(metavar="TASK", help="The name of the arrival to take out.")],
    source: Annotated[str, typer.Option("--from", metavar="REF", help="The checkpoint that was folded in as TASK.")],
    no_wait: NoWait = False,
    threads: Threads = None,
    allow_pickle: AllowPickle = False,
    as_json: Json = False,
) -> None:
    """Take an arrival out again, for rules whose memory is a sum."""
    from mergeway.cli.display import progress
    from mergeway.trunk import Trunk

    with progress() as bar:
        opened = Trunk.open(trunk, threads=threads, progress=bar)
        record = opened.remove(task, source, wait=not no_wait, allow_pickle=allow_pickle)
    _print_record(record, as_json)


@app.command()
def memory(trunk: TrunkPath, as_json: Json = False) -> None:
    """Show the calibration samples that the trunk remembers: tasks, samples, bytes."""
    from mergeway.cli.display import console, print_json, table
    from mergeway.trunk import Trunk

    held = Trunk.open(trunk).memory()
    if as_json:
        print_json(held)
        return
    if held["tasks"]:
        rows = [(row["task"], str(row["samples"])) for row in held["tasks"]]
        console().print(table(("task", "samples"), rows, numbers=("samples",)))
    shared = "by utility" if held["share"] == "utility" else "evenly"
    console().print(
        f"{held['samples']} of at most {held['size']} samples, shared {shared}, seed {held['seed']}, {held['bytes']} bytes",
        markup=False,
    )


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


@app.command()
def log(trunk: TrunkPath, as_json: Json = False) -> None:
    """Show the history, newest first."""
    from mergeway.cli.display import console, print_json
    from mergeway.trunk import Trunk

    opened = Trunk.open(trunk)
    records, kept = opened.log(), set(opened.kept_steps())
    if as_json:
        print_json([asdict(r) for r in records])
        return
    out = console()
    for record in reversed(records):
        marks = [m for m, there in (("deployed", record is records[-1]), ("kept", record.step in kept)) if there]
        out.print(_headline(record) + (f"  [cyan]({', '.join(marks)})[/cyan]" if marks else ""))
        for name, value in _lines(record):
            out.print(f"    {name:<8} {value}", style="dim" if name in ("date", "model") else "", markup=False)
        out.print()


@app.command()
def show(
    trunk: TrunkPath,
    step: Annotated[
        int | None, typer.Argument(metavar="STEP", help="A step; by default the last.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Show one step whole: what was folded, what the rule found, what the model now holds."""
    from mergeway.cli.display import console, print_json, short, table
    from mergeway.trunk import Trunk

    opened = Trunk.open(trunk)
    record = opened.record(step) if step is not None else opened.log()[-1]
    folded = opened.folded(record.step)
    if as_json:
        print_json({**asdict(record), "folded": [asdict(f) for f in folded]})
        return
    out = console()
    out.print(_headline(record))
    facts = [(k, f"{v:.6g}" if isinstance(v, float) else str(v)) for k, v in record.details.get("facts", {}).items()]
    settings = ", ".join(f"{k}={v}" for k, v in opened.rule.options().items() if v is not None)
    extra = [
        ("rule", f"{opened.rule.name}{' (' + settings + ')' if settings else ''}"),
        ("base", opened.base_ref),
        ("hash", record.hash),
        *facts,
    ]
    for name, value in [*_lines(record), *extra]:
        out.print(f"    {name:<10} {value}", markup=False)
    if folded:
        total = sum(f.weight for f in folded)
        rows = [
            (str(f.step), f.task, f"{f.weight:g}", f"{100 * f.weight / total:.1f} %", short(f.digest), f.source)
            for f in folded
        ]
        out.print(
            table(("step", "task", "weight", "share", "digest", "source"), rows, numbers=("step", "weight", "share"))
        )


@app.command()
def verify(trunk: TrunkPath, threads: Threads = None, as_json: Json = False) -> int:
    """Check every byte of the trunk, and its base, against the journal."""
    import sys

    from mergeway.cli.display import console, print_json, progress
    from mergeway.trunk import Trunk

    with progress() as bar:
        opened = Trunk.open(trunk, threads=threads, progress=bar)
        problems = opened.verify()
    if as_json:
        print_json({"trunk": str(trunk), "intact": not problems, "problems": problems})
    else:
        for problem in problems:
            print(f"error: {problem}", file=sys.stderr)
        if not problems:
            console().print(
                f"{trunk}: intact, {len(opened.log())} records, snapshots of steps {', '.join(map(str, opened.kept_steps()))}",
                markup=False,
            )
    return 2 if problems else 0


@app.command()
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
    _print_record(record, as_json)


@app.command()
def export(
    trunk: TrunkPath,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The model directory to write.")],
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", help="float64, float32, float16 or bfloat16; by default that of the base.", show_default=False
        ),
    ] = None,
    lora: Annotated[
        int | None,
        typer.Option(
            "--lora", metavar="RANK", help="Write the update as a PEFT adapter of this rank.", show_default=False
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option("--task", help="Put this task's own head into the model.", show_default=False),
    ] = None,
    shard_size: ShardSize = "5GB",
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Write the deployed model as a directory that transformers loads, or its update as an adapter that peft loads."""
    from mergeway.checkpoint.writer import read_size
    from mergeway.cli.display import console, print_json, progress
    from mergeway.params import read_dtype
    from mergeway.trunk import Trunk

    wanted = read_dtype(dtype) if dtype else None
    with progress() as bar:
        opened = Trunk.open(trunk, progress=bar)
        last = opened.log()[-1]
        done: dict[str, Any] = {"out": str(out), "step": last.step, "result": last.result}
        if lora is not None:
            options = {"dtype": wanted} if wanted else {}
            adapter = opened.export_lora(out, lora, force=force, command=command_line(), **options)
            done |= _adapter_json(adapter)
        else:
            opened.export(
                out,
                dtype=wanted,
                task=task,
                shard_size=read_size(shard_size),
                force=force,
                command=command_line(),
            )
    if as_json:
        print_json(done)
        return
    if lora is not None:
        _print_adapter(done)
    what = f" as a rank-{done['rank']} adapter" if lora is not None else ""
    console().print(f"step {last.step} of {trunk} exported to {out}{what}", markup=False)


def _adapter_json(adapter: Adapter) -> dict[str, Any]:
    return {
        "rank": adapter.rank,
        "kept": adapter.kept,
        "layers": [asdict(row) for row in adapter.layers],
        "left_out": [asdict(row) for row in adapter.left_out],
    }


def _print_adapter(done: dict[str, Any]) -> None:
    """What each layer keeps of its update, and which tensors an adapter has no place for."""
    from mergeway.cli.display import console, table

    left = sum(row["energy"] for row in done["left_out"])
    total = left + sum(row["energy"] for row in done["layers"])
    rows = [
        (r["name"], "×".join(map(str, r["shape"])), f"{100 * r['energy'] / total:.2f} %", f"{100 * r['kept']:.2f} %")
        for r in done["layers"]
    ]
    if done["left_out"]:
        count = len(done["left_out"])
        rows.append((f"{count} without a place", "", f"{100 * left / total:.2f} %", "0.00 %"))
    rows.append(("all", "", "100.00 %", f"{100 * done['kept']:.2f} %"))
    columns = ("tensor", "shape", "energy", "kept")
    console().print(table(columns, rows, numbers=columns[1:]))


def _print_record(record: Record, as_json: bool) -> None:
    from mergeway.cli.display import console, print_json

    if as_json:
        print_json(asdict(record))
        return
    out = console()
    out.print(_headline(record))
    for name, value in _lines(record):
        out.print(f"    {name:<8} {value}", markup=False)


def _headline(record: Record) -> str:
    from rich.markup import escape

    what = {"rollback": f"to step {record.details.get('to')}", "init": str(record.details.get("rule"))}.get(
        record.kind, record.task or ""
    )
    return f"[bold yellow]step {record.step}[/bold yellow] {record.kind} [bold]{escape(what)}[/bold]"


def _lines(record: Record) -> list[tuple[str, Any]]:
    from mergeway.cli.display import short

    lines: list[tuple[str, Any]] = [("date", record.time.replace("T", " "))]
    if record.source:
        lines.append(("from", f"{record.source} ({short(record.digest)})"))
    if record.weight is not None:
        total = record.stream.get("total")
        share = f" of {total:g}" if total and record.kind == "add" else ""
        lines.append(("weight", f"{record.weight:g}{share}"))
    lines.append(("model", short(record.result)))
    return lines
