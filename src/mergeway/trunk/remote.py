"""A trunk by URL: read as it was at one moment, never written."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from mergeway.checkpoint.remote import fetched, is_there
from mergeway.checkpoint.resolve import url_of
from mergeway.core.progress import SILENT, Progress
from mergeway.errors import CheckpointError, TrunkError
from mergeway.trunk.store import Store


class RemoteStore(Store):
    """The files of a trunk on a remote, fetched into the cache.

    A change needs a lock that dies with its holder and one moment at which it has happened. An object store has neither.
    """

    def __init__(self, url: str) -> None:
        try:
            super().__init__(fetched(url))
        except CheckpointError as problem:
            raise TrunkError(str(problem)) from None
        self.url = url

    @contextmanager
    def writer(self, wait: bool = True, progress: Progress = SILENT) -> Generator[None]:
        """Refuse: nothing here could be committed."""
        refuse_to_write(self.url)
        yield


def store_at(path: str | Path) -> Store:
    """The files of a trunk on this disk, or of one on a remote."""
    url = url_of(path)
    if url is None:
        return Store(Path(path))
    return Store(fetched(url)) if url.startswith(("file://", "local://")) else RemoteStore(url)


def is_trunk(path: str | Path) -> bool:
    """Whether a path or URL is a trunk."""
    url = url_of(path)
    return is_there(f"{url}/journal.jsonl") if url else (Path(path) / "journal.jsonl").exists()


def new_place(path: str | Path) -> Path:
    """Where a new trunk goes, which must be on this disk."""
    url = url_of(path)
    if url is None:
        return Path(path)
    if not url.startswith(("file://", "local://")):
        refuse_to_write(url)
    return fetched(url)


def refuse_to_write(url: str) -> None:
    """One line that says what to do instead."""
    raise TrunkError(
        f"{url}: a trunk on a remote is only read, because its lock and its commits need a disk; copy it to one, change it there, and copy it back"
    )
