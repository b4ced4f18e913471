"""A directory that appears whole or not at all: written beside its place under another name, and swapped in when it is done."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from mergeway.core.files import alive, flush, flush_tree, make_directory, unsure, writing
from mergeway.core.ranks import ALONE, Team

_RENAME_EXCHANGE = 2  # linux/fs.h
_AT_FDCWD = -100  # fcntl.h: paths are relative to the working directory
# What a kernel or a file system answers that cannot exchange two names.
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


@contextlib.contextmanager
def staged(out: Path, replace: bool = False, team: Team = ALONE) -> Iterator[Path]:
    """A new directory beside `out` that takes its place when the block ends well, and vanishes when it does not.

    With `replace` it may take the place of a directory that holds something; on any failure the old one stays. Every rank
    of a team gets the same stage, and the lead makes and names it.
    """
    stage = team.from_lead(lambda: _make_stage(out))
    try:
        yield stage
        team.from_lead(lambda: _place_directory(stage, out, replace))
    finally:
        if team.lead:
            shutil.rmtree(stage, ignore_errors=True)


def _make_stage(out: Path) -> Path:
    restore(out)
    make_directory(out.parent)
    stage = out.parent / f".{out.name}.partial-{os.getpid()}"
    with writing(out):
        stage.mkdir()
    return stage


def _place_directory(stage: Path, out: Path, replace: bool) -> None:
    with writing(out):
        if not (replace and out.exists()):
            flush_tree(stage)
            os.rename(stage, out)
            _flush_or_undo(out, lambda: os.rename(out, stage))
            return
        flush_tree(stage)
        swap(stage, out)
        _flush_or_undo(out, lambda: swap(stage, out))


def _flush_or_undo(out: Path, undo: Callable[[], None]) -> None:
    """Make sure of a name that was just given, or take it back; what cannot be taken back either is there."""
    try:
        flush(out.parent)
    except OSError as problem:
        try:
            undo()
        except OSError:
            raise unsure(out, problem) from None
        raise


def swap(new: Path, old: Path) -> None:
    """Let two directories beside each other change names: in one step where the system can, else in three that go back."""
    if _exchange(new, old):
        return
    aside = old.parent / f".{old.name}.replaced-{os.getpid()}"
    os.rename(old, aside)
    try:
        os.rename(new, old)
        try:
            os.rename(aside, new)
        except OSError:
            os.rename(old, new)
            raise
    except OSError:
        os.rename(aside, old)
        raise


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False where the system, or this file system, cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):  # another system, or an older C library
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def restore(out: Path) -> None:
    """Put right what a killed process left beside `out`: an old directory that was set aside comes back, the rest goes."""
    name = re.escape(out.name)
    # A trunk that is made in a stage has a stage of its own beside it.
    found = re.compile(rf"\.{name}\.(partial|replaced)-(\d+)|\.\.{name}\.partial-\d+\.partial-(\d+)")
    with writing(out):
        beside = list(out.parent.iterdir()) if out.parent.is_dir() else []
        for left in beside:
            match = found.fullmatch(left.name)
            if not match or alive(int(match[2] or match[3])):
                continue
            if match[1] == "replaced" and not out.exists():
                os.rename(left, out)
            else:
                shutil.rmtree(left, ignore_errors=True)
