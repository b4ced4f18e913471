"""How a file or a directory appears on the disk: whole or not at all, and still there after a power cut.

`place` is the one order of things: flush what is new, give it its name, flush the directory that holds the name. What was
not flushed before it got its name may be empty after a power cut, however long ago it was written. So a writer may leave
the files of a stage unflushed, whatever library wrote them: `place` flushes them all, each once.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from mergeway.errors import CheckpointError, UnsureError

_ENDLESS = "a pipe, a socket or a device, not a file"


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the operating system says about a file being written into one clear line."""
    try:
        yield
    except OSError as problem:
        if problem.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CheckpointError(
                f"{path}: no space left on the disk; nothing was changed, free some and run again"
            ) from None
        raise CheckpointError(f"{path}: cannot be written ({problem.strerror or problem})") from None


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what the operating system says about a file being read into one clear line."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as problem:
        raise CheckpointError(f"{path}: cannot be read ({problem.strerror or problem})") from None


def regular(path: Path) -> None:
    """Refuse what is no file with an end: a pipe waits for ever, a device may never stop."""
    with reading(path):
        endless = _is_endless(path)
    if endless:
        raise CheckpointError(f"{path}: is {_ENDLESS}; save it as a file first")


def contents(path: Path) -> bytes:
    """All of a file, or what the system says against it; of a pipe or a device, that it is one."""
    if _is_endless(path):
        raise OSError(errno.EINVAL, f"it is {_ENDLESS}", str(path))
    return path.read_bytes()


def _is_endless(path: Path) -> bool:
    mode = os.stat(path).st_mode
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def begin_flush(fd: int, start: int, size: int) -> None:
    """Have the disk begin with bytes of a file, and do not wait: only `flush` says when they are there, and finds less to do."""
    if ask := _sync_file_range():
        ask(fd, start, size, 2)  # SYNC_FILE_RANGE_WRITE


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError, TypeError):  # not Linux
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return function


def flush(path: Path) -> None:
    """Flush a finished file, or the names in a directory, whoever wrote them."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        _close(fd)


def flush_tree(root: Path) -> None:
    """Flush a file, or a directory with everything in it; what a symbolic link points to is not ours."""
    if root.is_symlink():
        return
    if root.is_dir():
        for path in sorted(root.iterdir()):
            flush_tree(path)
    flush(root)


def place(new: Path, path: Path) -> None:
    """Give a new file or directory its name for good: flush it, rename it, flush the directory that holds it."""
    flush_tree(new)
    os.rename(new, path)
    flush(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a small file in a stage, or under a name of its own, for `place` to flush."""
    with writing(path):
        path.write_text(text, encoding="utf-8")


def append(path: Path, data: bytes, end: int) -> None:
    """Put data behind the first `end` bytes of a file, for good or not at all; what was behind them is gone."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.ftruncate(fd, end)
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(fd, data[done:], end + done)
            os.fsync(fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, end)
                os.fsync(fd)
            raise
    finally:
        _close(fd)


def replace_unsure(path: Path, content: bytes) -> None:
    """Write a small file whole or not at all, without waiting for its name: a power cut may bring the old one back."""
    new = _beside(path)
    try:
        with writing(path):
            new.write_bytes(content)
            flush(new)
            os.rename(new, path)
    except BaseException:
        _remove(new)
        raise


def replace_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all: a reader sees the old one or the new one."""
    with replaced(path) as new:
        write_text(new, text)


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """The name to write a file under; the file takes its place when the block ends well, and vanishes when it does not.

    The name is in a directory of its own beside the file: some libraries put files of their own beside what they write.
    """
    sweep(path)
    stage = _beside(path)
    try:
        with writing(path):
            stage.mkdir()
            new = stage / path.name
            yield new
            flush_tree(new)
            os.rename(new, path)
            shutil.rmtree(stage, ignore_errors=True)
            try:
                flush(path.parent)
            except OSError as problem:
                raise unsure(path, problem) from None
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def copy_file(source: Path, target: Path) -> None:
    """A copy of a file's content in a stage."""
    with writing(target):
        shutil.copyfile(source, target)


def make_directory(path: Path) -> None:
    """A directory with its parents, each new name flushed; no error when it is there."""
    with writing(path):
        missing = [p for p in (path, *path.parents) if not p.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for new in reversed(missing):
            flush(new.parent)


def unsure(path: Path, problem: OSError) -> UnsureError:
    """What is to be said when something has its name, and nobody knows whether it will keep it."""
    return UnsureError(f"{path}: is written", problem.strerror or str(problem))


def alive(pid: int) -> bool:
    """Whether another process has this number."""
    if pid == os.getpid():  # in a container, a process that was killed may have had our number
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def sweep(path: Path) -> None:
    """Remove what killed processes left of this file."""
    found = re.compile(rf"{re.escape(path.name)}\.(\d+)\.new")
    with contextlib.suppress(OSError):
        for left in path.parent.iterdir():
            match = found.fullmatch(left.name)
            if match and not alive(int(match[1])):
                shutil.rmtree(left) if left.is_dir() else left.unlink()


def _close(fd: int) -> None:
    """What was flushed is on the disk, whatever closing it says."""
    with contextlib.suppress(OSError):
        os.close(fd)


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}.new")


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
