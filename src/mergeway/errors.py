"""The errors a user can meet: each message says what is wrong, where, and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class MergewayError(Exception):
    """A mistake in the input or the environment; the command line prints it as one line and exits with 2."""


class CheckpointError(MergewayError):
    """A checkpoint cannot be read, or does not fit the base."""


class OptionError(MergewayError):
    """A rule, an option or a weight that does not exist or has no such value."""


class TrunkError(MergewayError):
    """A trunk that cannot be opened, changed or trusted."""


class TrunkLocked(TrunkError):
    """Another process is writing to the trunk."""


class BaseNotFound(TrunkError):
    """The base of a trunk is not where it was, nor anywhere that it is looked for."""


class GateRefused(TrunkError):
    """A fold that would have cost too much; nothing was deployed. `checks` has what each task would have been worth."""

    def __init__(self, message: str, checks: Sequence[dict[str, object]] = ()) -> None:
        super().__init__(message)
        self.checks = list(checks)


def suggest(word: str, known: Iterable[str]) -> str:
    """The tail of an error about an unknown word: the nearest known one, and all of them."""
    choices = sorted(known)
    near = difflib.get_close_matches(word, choices, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return f"{hint}known: {', '.join(choices)}" if choices else f"{hint}there are none"
