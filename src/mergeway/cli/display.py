"""What the commands print: rich tables on stdout, progress bars on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from mergeway.cli.app import Settings
from mergeway.core.printed import in_json, printable
from mergeway.core.progress import SILENT, Progress


class _Console(Console):
    def print(self, *objects: object, **options: Any) -> None:
        """Names come from files: what would steer the terminal is shown, not sent."""
        super().print(*(printable(o, keep="\n") if isinstance(o, str) else o for o in objects), **options)

    def on_broken_pipe(self) -> None:
        """The reader of our output has gone: `main` knows what to do, where rich would exit with 1."""
        raise BrokenPipeError


def console() -> Console:
    # A pipe has no width; rich would take 80 columns and cut what is wider.
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 1000
    return _Console(highlight=False, soft_wrap=True, width=width)


def print_json(value: object) -> None:
    print(in_json(json.dumps(value, indent=2, ensure_ascii=False)))


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str] = (), whole: Sequence[str] = ()
) -> Table:
    """A plain table; the columns named in `numbers` are aligned to the right, those in `whole` never cut into lines."""
    shown = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        align = "right" if column in numbers else "left"
        shown.add_column(column, justify=align, overflow="fold", no_wrap=column in whole)
    for row in rows:
        shown.add_row(*(escape(printable(cell)) for cell in row))
    return shown


class _Done(DownloadColumn):
    """How much is done: bytes as people write them, anything else as a plain count."""

    def render(self, task: Task) -> Text:
        unit = task.fields["unit"]
        if unit == "bytes":
            return super().render(task)
        if task.total is None:
            return Text("")
        return Text(f"{task.completed:.0f}/{task.total:.0f} {unit}")


class _Bar(Progress):
    """Draws one line for the stage that is under way."""

    def __init__(self, bar: RichProgress) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=None, unit="")

    def begin(self, what: str, total: int | None, unit: str) -> None:
        self._bar.reset(self._task, description=printable(what), total=total, unit=unit)

    def describe(self, what: str) -> None:
        self._bar.update(self._task, description=printable(what))

    def advance(self, done: int) -> None:
        self._bar.advance(self._task, done)

    def note(self, text: str) -> None:
        self._bar.console.print(printable(text), markup=False)


class _Notes(Progress):
    """Without a terminal there is no bar, but the log still gets the notes."""

    def note(self, text: str) -> None:
        print(printable(text), file=sys.stderr, flush=True)


@contextmanager
def progress() -> Iterator[Progress]:
    """Progress on stderr: a bar on a terminal, notes elsewhere, nothing with --quiet."""
    if Settings.quiet:
        yield SILENT
        return
    if not sys.stderr.isatty():
        yield _Notes()
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), _Done(), TimeRemainingColumn())
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield _Bar(bar)


def short(digest: str | None) -> str:
    """Enough of a digest to tell two apart."""
    return digest[:12] if digest else "-"
