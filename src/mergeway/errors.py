"""The errors a user can meet: each message says what is wrong, where, and what to do about it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

_SHELL: ContextVar[bool] = ContextVar("speaks to a shell", default=False)
# A message names arguments by their flags; these are called otherwise in Python, the rest by the same words.
_IN_PYTHON = {
    "allow-code": "compute=Compute(allow_code=True)",
    "min": "at_least",
    "memory": "size",
    "memory-share": "share",
    "memory-seed": "seed",
    "no-wait": "wait=False",
    "no-memory": "remember=False",
    "objective module:function": "objective=FUNCTION",
}
_SWITCHES = ("again", "allow-pickle", "backbone", "force", "resume")
# A command in quotes or at the end stays as it is; a flag may have a value in capitals, or one for a task.
_FLAG = re.compile(
    r"'(?:mergeway|hf|pip|python) [^']*'|with: python .*$|(?<![^\s(])--(?P<name>objective module:function|[a-z]+(?:-[a-z]+)*)"
    r"(?:(?:=| )(?P<task>[\w.-]+)=(?P<of>DATA|FILE|VALUE|…|[\d.]+)| (?P<value>[A-Z]{2,})\b)?"
)


class MergewayError(Exception):
    """A mistake in the input or the environment; the command line prints it as one line and exits with 2.

    The message names arguments as the reader wrote them: as flags on the command line, by their names in Python.
    """

    def __str__(self) -> str:
        text = super().__str__()
        return text if _SHELL.get() else _FLAG.sub(_in_python, text)


@contextmanager
def speaking_to_a_shell() -> Generator[None]:
    """Messages name arguments by their flags."""
    before = _SHELL.set(True)
    try:
        yield
    finally:
        _SHELL.reset(before)


def _in_python(found: re.Match[str]) -> str:
    flag = found["name"]
    if flag is None:
        return found[0]
    name = _IN_PYTHON.get(flag, flag.replace("-", "_")) + ("=True" if flag in _SWITCHES else "")
    if found["task"]:
        task = found["task"] if found["task"] == "TASK" else repr(found["task"])
        return f"{name}={{{task}: {found['of']}}}"
    return f"{name}={found['value']}" if found["value"] else name


class CheckpointError(MergewayError):
    """A checkpoint cannot be read, or does not fit the base."""


class UnsureError(MergewayError):
    """What was done is there, but may not outlive a power cut; `cause` is what the system said."""

    def __init__(self, what: str, cause: str) -> None:
        super().__init__(f"{what}, but a power cut now could undo it ({cause})")
        self.cause = cause


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
