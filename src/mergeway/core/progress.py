"""How long work tells of itself: the library counts, the command line draws a bar."""

from __future__ import annotations


class Progress:
    """Listens to long work and says nothing; the command line draws a bar instead."""

    def begin(self, what: str, total: int | None, unit: str) -> None:
        """A stage starts, over that many of the unit, or over nobody knows how many; bytes are shown as kB, MB, GB."""

    def describe(self, what: str) -> None:
        """The stage goes on under another description."""

    def advance(self, done: int) -> None:
        """So many more are done; may come from any thread."""

    def note(self, text: str) -> None:
        """Something the user should know while waiting."""


SILENT = Progress()
