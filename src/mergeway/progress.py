"""How long work tells of itself: the library counts bytes, the command line draws them."""

from __future__ import annotations


class Progress:
    """Listens to long work and says nothing; the command line draws a bar instead."""

    def begin(self, what: str, total: int, unit: str = "bytes") -> None:
        """A stage starts, over that many bytes or steps."""

    def describe(self, what: str) -> None:
        """The stage goes on under another description."""

    def advance(self, done: int) -> None:
        """So many more bytes are done; may come from any thread."""

    def note(self, text: str) -> None:
        """Something the user should know while waiting."""


SILENT = Progress()
