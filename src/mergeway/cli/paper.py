"""`mergeway bench --table` and `--figure`: the papers' tables and figures for a suite."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from mergeway.bench.paper import Study, Table, Value, choose, default_lengths
from mergeway.bench.paper.formats import as_json as table_json
from mergeway.bench.paper.registry import Kind
from mergeway.bench.paper.study import FEATURED
from mergeway.bench.suite import Suite
from mergeway.cli.display import console, print_json, progress
from mergeway.errors import OptionError


def make_paper(
    suite: Suite,
    tables: str | None,
    figures: str | None,
    rules: Sequence[str],
    featured: Sequence[str] | None,
    lengths: Sequence[int] | None,
    orders: int,
    samples: int,
    out: Path | None,
    jobs: int,
    tunes: bool,
    as_json: bool,
) -> None:
    """Make what is named, run what it needs, print the tables and say where everything is."""
    wanted: list[tuple[Kind, str | None]] = [("table", tables), ("figure", figures)]
    items = [item for kind, text in wanted if text for item in choose(kind, text, suite.protocol)]
    place = out or Path(f"{suite.name}-paper")
    if place.exists() and (not place.is_dir() or (any(place.iterdir()) and not (place / "kept").is_dir())):
        raise OptionError(f"{place}: exists and holds no tables or figures; choose another directory with --out")
    finished: list[Table] = []
    written: list[list[Path]] = []
    with progress() as bar:
        study = Study(
            suite,
            place,
            rules,
            featured or FEATURED,
            lengths or default_lengths(len(suite.tasks)),
            orders,
            samples,
            jobs,
            bar,
            tunes,
        )
        study.check()
        for item in items:
            table, paths = item.write(study)
            finished += [table] if table else []
            written.append(paths)
    if as_json:
        print_json({"tables": [table_json(t) for t in finished], "files": [str(p) for paths in written for p in paths]})
        return
    for table in finished:
        print_table(table)
    for paths in written:
        suffixes = ",".join(path.suffix.removeprefix(".") for path in paths)
        console().print(f"{paths[0].with_suffix('')}.{{{suffixes}}}", markup=False)


def print_table(table: Table) -> None:
    """A table of the papers on the terminal: title, rows with the best in bold, note."""
    screen = console()
    shown = RichTable(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column, numeric in zip(table.columns, table.numeric(), strict=True):
        shown.add_column(column, justify="right" if numeric else "left", no_wrap=True)
    for number, (row, texts) in enumerate(zip(table.rows, table.texts(), strict=True)):
        if number in table.breaks:
            shown.add_row()
        cells = zip(row, texts, strict=True)
        shown.add_row(*(Text(t, "bold" if isinstance(c, Value) and c.best else "") for c, t in cells))
    screen.print(Text(table.title, "bold"), end="\n\n")
    # A number cut in two misleads: a table wider than the terminal is left to the terminal to wrap.
    wide = Measurement.get(screen, screen.options.update(max_width=1000), shown).maximum
    screen.print(shown, width=max(screen.width, wide))
    screen.print(f"\n{table.note}\n" if table.note else "", markup=False)
