"""A disk that loses what was not flushed: records what a piece of work does to a directory, and replays every power cut.

Files and directories are known by their inode. A flushed file keeps the content it had then, another one is empty. Names
are kept by the journal of the file system: up to the last directory that was flushed they are there for sure, from then on
up to any point before the cut; or, on a disk that promises less, in every directory only those of its last flush.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mergeway.core import stages

Names = dict[int, dict[str, int]]  # the names in every directory, each with what it names


@dataclass
class Disk:
    """What happened below a directory: every state of its names, and what was flushed when."""

    root: Path
    names: list[Names] = field(default_factory=list)
    flushed: list[dict[int, bytes]] = field(default_factory=list)
    sure: list[int] = field(default_factory=list)  # at each state, which earlier one survives for sure
    oldest: list[Names] = field(default_factory=list)
    links: dict[int, str] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    _held: dict[int, int] = field(default_factory=dict)  # an open file keeps its inode from being used again

    def look(self, call: str, flushed: int | None = None) -> None:
        """A system call has changed or flushed something."""
        now: Names = {}
        self._walk(self.root, now)
        content = dict(self.flushed[-1]) if self.flushed else {}
        oldest = dict(self.oldest[-1]) if self.oldest else dict(now)
        sure = self.sure[-1] if self.sure else 0
        if not self.names:  # all that was there before is on the disk
            content = {i: os.pread(fd, 1 << 30, 0) for i, fd in self._held.items() if i not in now}
        elif flushed in now:
            oldest[flushed], sure = now[flushed], len(self.names)
        elif flushed in self._held:
            content[flushed] = os.pread(self._held[flushed], 1 << 30, 0)
        self.names.append(now)
        self.flushed.append(content)
        self.oldest.append(oldest)
        self.sure.append(sure)
        self.calls.append(call)

    def _walk(self, directory: Path, now: Names) -> int:
        here = os.stat(directory).st_ino
        self._hold(directory, here)
        now[here] = {}
        for entry in os.scandir(directory):
            inode = entry.inode()
            now[here][entry.name] = inode
            if entry.is_symlink():
                self.links[inode] = os.readlink(entry.path)
            elif entry.is_dir():
                self._walk(Path(entry.path), now)
            else:
                self._hold(Path(entry.path), inode)
        return here

    def _hold(self, path: Path, inode: int) -> None:
        if inode not in self._held:
            self._held[inode] = os.open(path, os.O_RDONLY)

    @property
    def last(self) -> int:
        """The cut behind the last call, when the work is done."""
        return len(self.names) - 1

    def cuts(self, target: Path) -> Iterator[tuple[int, Path]]:
        """What is found after a power cut behind each call, in a new directory each, no state twice."""
        root = os.stat(self.root).st_ino
        seen: set[tuple] = set()
        for cut in range(len(self.names)):
            kept = [self.names[k] for k in range(self.sure[cut], cut + 1)]
            for names in (*kept, self.oldest[cut]):
                found = self._tree(root, names, self.flushed[cut])
                if (key := (cut == self.last, *sorted(found.items()))) not in seen:
                    seen.add(key)
                    made = target / f"{len(seen)}"
                    _write(made, found)
                    yield cut, made

    def _tree(self, inode: int, names: Names, content: dict[int, bytes], at: str = "") -> dict[str, bytes | str | None]:
        found: dict[str, bytes | str | None] = {at: None}
        for name, child in names.get(inode, {}).items():
            path = f"{at}/{name}" if at else name
            if child in self.links:
                found[path] = self.links[child]
            elif self._is_directory(child):
                found |= self._tree(child, names, content, path)
            else:
                found[path] = content.get(child, b"")
        return found

    def _is_directory(self, inode: int) -> bool:
        return stat.S_ISDIR(os.fstat(self._held[inode]).st_mode)

    def close(self) -> None:
        for fd in self._held.values():
            os.close(fd)


def _write(root: Path, found: dict[str, bytes | str | None]) -> None:
    for path, content in sorted(found.items()):
        if content is None:
            (root / path).mkdir(parents=True)
        elif isinstance(content, str):
            os.symlink(content, root / path)
        else:
            (root / path).write_bytes(content)


@contextmanager
def recorded(root: Path, exchange: bool = True) -> Iterator[Disk]:
    """Record what happens below a directory; without `exchange` as on a system that cannot swap two names."""
    disk = Disk(root)
    disk.look("start")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("rename", "replace", "unlink", "rmdir", "mkdir", "link", "fsync"):
            patch.setattr(os, name, _watched(disk, name, getattr(os, name)))
        swap = stages._exchange if exchange else lambda one, other: False
        patch.setattr(stages, "_exchange", _watched(disk, "exchange", swap))
        yield disk
    disk.look("end")


def _watched(disk: Disk, name: str, call):
    def watched(*args, **kwargs):
        inode = os.fstat(args[0]).st_ino if name == "fsync" else None
        disk.look(f"before {name}")
        result = call(*args, **kwargs)
        disk.look(name, inode)
        return result

    return watched
