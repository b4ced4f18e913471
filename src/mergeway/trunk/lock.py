"""The lock of a trunk's one writer: held on an open file, so the operating system frees that of a killed process."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from mergeway.core.progress import Progress
from mergeway.errors import TrunkError, TrunkLocked

# The lock is somebody else's; some file systems say so by PermissionError.
_TAKEN = (BlockingIOError, PermissionError)


class WriterLock:
    """Held from `acquire` to `release`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def acquire(self, wait: bool, progress: Progress) -> None:
        """Take the lock, after whoever holds it; without `wait` it is an error that somebody does."""
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if not self._try():
                if not wait:
                    raise TrunkLocked(
                        f"{self._path.parent}: another process is writing to the trunk; try again later, or leave out --no-wait"
                    )
                progress.note(f"waiting for another process to finish with {self._path.parent}")
                fcntl.flock(self._fd, fcntl.LOCK_EX)
        except OSError as problem:
            self.release()
            raise TrunkError(
                f"{self._path}: cannot be locked for writing ({problem.strerror}); a trunk needs a file system that has flock"
            ) from None
        except BaseException:
            self.release()
            raise

    def _try(self) -> bool:
        assert self._fd is not None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except _TAKEN:
            return False
        return True

    def release(self) -> None:
        """Give the lock up, if it is held."""
        if self._fd is not None:
            with contextlib.suppress(OSError):  # the file is empty: nothing in it can be lost
                os.close(self._fd)
            self._fd = None
