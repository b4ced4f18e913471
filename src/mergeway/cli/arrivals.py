"""The options of `mergeway add`, how they are read, and what it prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mergeway.cli import completion

if TYPE_CHECKING:
    from mergeway.checkpoint.source import JsonObject
    from mergeway.errors import GateRefused
    from mergeway.trunk import Trunk
    from mergeway.trunk.journal import Record

Arrivals = Annotated[
    list[str], typer.Argument(metavar="ARRIVAL", help="A checkpoint or adapter tuned from the base; or several.")
]
Weight = Annotated[float, typer.Option("--weight", help="The arrival's utility against the others.")]
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
        help="The task's frozen head: a safetensors file with 'weight' \\[classes, width]; TASK=FILE for an earlier task.",
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
NoMemory = Annotated[
    bool, typer.Option("--no-memory", help="Keep none of the data: it has to be given again at every later add.")
]
Again = Annotated[bool, typer.Option("--again", help="Fold in the same weights once more.")]
Check = Annotated[
    list[str] | None,
    typer.Option(
        "--check",
        metavar="TASK=DATA",
        help="Judge the fold on test data of a task before it is deployed; repeat for more.",
        show_default=False,
        autocompletion=completion.trunk_task_pairs,
    ),
]
MaxDrop = Annotated[
    float | None,
    typer.Option(
        "--max-drop",
        metavar="P",
        help="Refuse the fold if an earlier task falls by more than P points.",
        show_default=False,
    ),
]
Least = Annotated[
    list[str] | None,
    typer.Option(
        "--min",
        metavar="TASK=P",
        help="Refuse the fold if a task is below P percent after it; repeat for more.",
        show_default=False,
        autocompletion=completion.trunk_task_pairs,
    ),
]
Holdout = Annotated[
    float | None,
    typer.Option(
        "--holdout",
        metavar="SHARE",
        help="Keep this share of --data in the trunk, never to fold with, to judge this and every later fold.",
        show_default=False,
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Fold and judge, but commit nothing.")]
Message = Annotated[str | None, typer.Option("--message", "-m", help="A note for the journal.", show_default=False)]


def check_single(arrivals: Sequence[str], dry_run: bool, own: Sequence[str]) -> None:
    """What only one arrival can have."""
    from mergeway.errors import OptionError

    if len(arrivals) > 1 and own:
        raise OptionError(f"{own[0]}: is for one arrival; add them one by one")
    if len(arrivals) > 1 and dry_run:
        raise OptionError("--dry-run: is for one arrival, since none is there for the next to follow")


def add_all(
    trunk: Trunk, arrivals: Sequence[str], task: str | None, weight: float, options: JsonObject, as_json: bool
) -> list[Record]:
    """Fold arrivals in one after another; the first that fails ends it, and the error says what was committed before."""
    from mergeway.errors import GateRefused, MergewayError

    records: list[Record] = []
    for arrival in arrivals:
        try:
            records.append(trunk.add(arrival, task, weight, **options))
        except MergewayError as problem:
            print_added(records, False, as_json and bool(records))
            if isinstance(problem, GateRefused):
                _print_refused(problem, as_json)
            if len(arrivals) > 1:
                steps = ", ".join(f"step {r.step} '{r.task}'" for r in records) or "nothing"
                problem.args = (f"{problem} ({arrival}; committed before: {steps})",)
            raise
    return records


def print_added(records: Sequence[Record], dry_run: bool, as_json: bool) -> None:
    """The records of what was added; a list where there are several."""
    from mergeway.cli.display import console, print_json
    from mergeway.cli.records import print_record

    if as_json:
        rows = [asdict(record) for record in records]
        print_json(rows[0] if len(rows) == 1 else rows)
        return
    for record in records:
        print_record(record, False)
    if dry_run:
        console().print("nothing was committed", markup=False)


def _print_refused(problem: GateRefused, as_json: bool) -> None:
    from mergeway.cli.display import console, print_json
    from mergeway.cli.records import checks_table

    if as_json:
        print_json({"refused": str(problem), "checks": problem.checks})
        return
    console().print(checks_table(problem.checks))


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


def read_pairs(option: str, words: list[str] | None) -> dict[str, str]:
    """TASK=VALUE pairs as a mapping."""
    from mergeway.errors import OptionError

    pairs: dict[str, str] = {}
    for word in words or []:
        name, equals, value = word.partition("=")
        if not equals or not name or not value:
            raise OptionError(f"{option} {word!r}: expected TASK=VALUE, such as {option} svhn=test.npz")
        if name in pairs:
            raise OptionError(f"{option} {name}: given twice")
        pairs[name] = value
    return pairs


def read_least(words: list[str] | None) -> dict[str, float]:
    """TASK=P pairs as percentages by task."""
    from mergeway.errors import OptionError

    found: dict[str, float] = {}
    for name, value in read_pairs("--min", words).items():
        try:
            found[name] = float(value)
        except ValueError:
            raise OptionError(f"--min {name}={value}: expected a percentage, such as --min {name}=90") from None
    return found
