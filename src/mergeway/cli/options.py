"""Arguments and options that several commands share, with what a shell offers for them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mergeway.cli import completion

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Heads = Annotated[
    str | None,
    typer.Option(
        "--heads",
        metavar="REGEX",
        help="Tensors that each task keeps for itself; by default those of a classifier, '' for none.",
        show_default=False,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads", help="Worker threads; the result does not depend on it. Default: one a core.", show_default=False
    ),
]
AllowCode = Annotated[
    bool, typer.Option("--allow-code", help="Run Python code that the model directory brings; read it before.")
]
AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Read .bin, .pt and .pth files with torch's weights-only reader.")
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="An option of the rule; repeat for more.",
        show_default=False,
        autocompletion=completion.settings,
    ),
]
ShardSize = Annotated[str, typer.Option("--shard-size", help="Largest weight file, such as 5GB or 500MB.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing model directory.")]
NoWait = Annotated[
    bool, typer.Option("--no-wait", help="Fail instead of waiting when another process is writing to the trunk.")
]

BaseAt = Annotated[
    str | None,
    typer.Option(
        "--base", metavar="REF", help="Where the base is now, if it is not found where it was.", show_default=False
    ),
]
# A step by its number or its tag.
StepArgument = Annotated[
    str,
    typer.Argument(
        metavar="STEP",
        help="The step, by number or tag; 'log' marks those that are kept.",
        autocompletion=completion.trunk_steps,
    ),
]
StepOption = Annotated[
    str | None,
    typer.Option(
        "--step",
        metavar="STEP",
        help="A step, by number or tag; by default the last.",
        show_default=False,
        autocompletion=completion.trunk_steps,
    ),
]
TrunkPath = Annotated[Path, typer.Argument(metavar="TRUNK", help="The trunk's directory.")]
RuleName = Annotated[
    str,
    typer.Option(
        "--rule", help="How arrivals are folded in; 'mergeway rules' lists them.", autocompletion=completion.rules
    ),
]
SuiteName = Annotated[
    str,
    typer.Argument(metavar="SUITE", help="A suite's directory, or the name of one.", autocompletion=completion.suites),
]
