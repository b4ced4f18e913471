"""`mergeway bench`: rules on a suite, or on the arrivals of a trunk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mergeway.cli import completion
from mergeway.cli.app import COMPARE, app
from mergeway.cli.computing import computes
from mergeway.cli.options import Json, SuiteName

if TYPE_CHECKING:
    from mergeway.model.compute import Compute


Rules = Annotated[
    str,
    typer.Option(
        "--rules",
        help="Rules with commas between them, options behind colons (iso:scaling=1.5), or 'all'.",
        autocompletion=completion.several_rules,
    ),
]
Lengths = Annotated[
    str | None,
    typer.Option("--tasks", metavar="N[,N..]", help="Stream lengths; by default all tasks.", show_default=False),
]
Orders = Annotated[
    int, typer.Option("--orders", help="How many seeded orders of the tasks; for tables of Holistic CMM, seeds.")
]
Utilities = Annotated[str, typer.Option("--utilities", help="uniform, or random for a draw of weights per order.")]
SampleCount = Annotated[int, typer.Option("--samples", help="Calibration samples in all, for rules that need them.")]
Copies = Annotated[
    int | None,
    typer.Option("--copies", help="Copies of each sample that arrivals are asked about.", show_default="by --samples"),
]
Written = Annotated[
    bool, typer.Option("--written", help="Calibrate on texts that the experts write, not on training data.")
]
Tune = Annotated[
    bool, typer.Option("--tune", help="Add each rule with its one number chosen on the calibration samples.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check that everything is there, estimate time and disk, and run nothing.")
]
RunDirectory = Annotated[Path | None, typer.Option("--out", help="Keep the run in this directory.", show_default=False)]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")]
Jobs = Annotated[int, typer.Option("--jobs", help="Processes, each with one thread.")]
Engine = Annotated[
    str, typer.Option("--engine", help="local, or ray for tasks on a running Ray cluster or a local one.")
]
Tables = Annotated[
    str | None,
    typer.Option(
        "--table",
        metavar="N[,N..]",
        help="Make tables of the papers instead: 1 to 7 of ODE-M, opcm-2, opcm-3, holistic-1, .. or 'all'.",
        show_default=False,
    ),
]
Figures = Annotated[
    str | None,
    typer.Option(
        "--figure",
        metavar="N[,N..]",
        help="Make figures of the papers: ode-m-5, opcm-5, holistic-1, .. or 'all'; a bare number is ODE-M's where it has one.",
        show_default=False,
    ),
]


NoContinual = Annotated[
    bool,
    typer.Option("--no-continual", help="Leave the row of continual fine-tuning, which is trained, out of tables."),
]
OwnData = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="TASK=DATA",
        help="SUITE is a trunk: fold its arrivals anew by each rule and judge them on this test data; repeat for more.",
        show_default=False,
    ),
]
OwnHeads = Annotated[
    list[str] | None,
    typer.Option("--head", metavar="TASK=FILE", help="The frozen head that goes with --data.", show_default=False),
]


@app.command(rich_help_panel=COMPARE)
@computes
def bench(
    suite: SuiteName,
    rules: Rules = "all",
    tasks: Lengths = None,
    orders: Orders = 10,
    utilities: Utilities = "uniform",
    samples: SampleCount = 1024,
    copies: Copies = None,
    written: Written = False,
    tune: Tune = False,
    out: RunDirectory = None,
    resume: Resume = False,
    jobs: Jobs = 1,
    engine: Engine = "local",
    table: Tables = None,
    figure: Figures = None,
    no_continual: NoContinual = False,
    dry_run: DryRun = False,
    data: OwnData = None,
    head: OwnHeads = None,
    as_json: Json = False,
    *,
    compute: Compute,
) -> None:
    """Fold a suite's experts by several rules in several orders and compare accuracy and backward transfer."""
    if data:
        _bench_own(suite, rules, data, head, compute, as_json)
        return
    from mergeway.bench import bench as run_bench
    from mergeway.bench.tune import tune_rules
    from mergeway.cli.display import progress
    from mergeway.cli.forecast import forecast
    from mergeway.cli.objectives import find_suite
    from mergeway.cli.rows import print_run

    chosen, found, lengths = read_rules(rules), find_suite(suite, compute), read_lengths(tasks)
    if dry_run:
        forecast(found, chosen, lengths, orders, samples, out, as_json, bool(table or figure))
        return
    if table or figure:
        from mergeway.cli.paper import make_paper

        check_utilities(utilities)
        featured = None if rules == "all" else chosen
        make_paper(
            found, table, figure, chosen, featured, lengths, orders, samples, out, jobs, not no_continual, as_json
        )
        return
    how = {"lengths": lengths, "orders": orders, "utilities": utilities, "samples": samples, "copies": copies}
    how |= {"written": written, "out": out, "resume": resume, "jobs": jobs, "engine": engine, "compute": compute}
    with progress() as bar:
        tuned = tune_rules(found, chosen, samples, orders, lengths, bar) if tune else []
        run = run_bench(found.path, [*chosen, *tuned], **how, progress=bar)  # type: ignore[arg-type]
    print_run(run.as_json(), orders, as_json, losses=found.kind == "causal-lm")


def _bench_own(
    trunk: str, rules: str, data: list[str], head: list[str] | None, compute: Compute, as_json: bool
) -> None:
    """The arrivals of a trunk by several rules, on data of one's own."""
    from mergeway.bench.own import compare
    from mergeway.cli.arrivals import read_pairs
    from mergeway.cli.display import progress
    from mergeway.cli.rows import print_run
    from mergeway.trunk import Trunk

    given, heads = read_pairs("--data", data), read_pairs("--head", head)
    with progress() as bar:
        found = compare(Trunk.open(trunk, compute=compute), read_rules(rules), given, heads, bar)
    print_run(found, 1, as_json)


def read_rules(text: str) -> list[str]:
    """Rules from a comma-separated list; 'all' are those of the package."""
    from mergeway.rules import RULES

    return list(RULES) if text == "all" else [rule.strip() for rule in text.split(",") if rule.strip()]


def read_lengths(text: str | None) -> list[int] | None:
    """Stream lengths from a comma-separated list."""
    from mergeway.errors import OptionError

    if text is None:
        return None
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise OptionError(f"--tasks {text!r}: expected whole numbers with commas between them, such as 4,8") from None


def check_utilities(kind: str) -> None:
    """A table or a figure says itself which utilities it is with."""
    from mergeway.errors import OptionError

    if kind != "uniform":
        raise OptionError("--utilities: a table has its own; Table 2 and Figure 8 of ODE-M are those with random ones")
