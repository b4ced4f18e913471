"""Files by URL: fetched through fsspec into the cache, each once, and given as a directory of links to them.

    remote/files/KEY     a file; the key is of its address, its size, and what its store says of its content and last change
    remote/views/KEY/    a directory as it was at one moment: links to files

What is in them is checked as any checkpoint or trunk is, by the digests that a trunk has of it.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mergeway.checkpoint.mapped import one_line
from mergeway.core.cache import cache_root, kept
from mergeway.core.files import copy_file, make_directory
from mergeway.core.ranks import team
from mergeway.errors import CheckpointError

ON_DISK = ("file", "local")
# What stores say of a file besides its size; each says some of it.
_STAMPS = ("ETag", "etag", "md5Hash", "md5", "checksum", "crc32c", "generation", "VersionId", "version_id")
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")
# Name of a file, seen from the directory asked for, and its address, size and key.
Listing = dict[str, tuple[str, int, str]]


def fetched(url: str, patterns: Sequence[str] = ("*",)) -> Path:
    """What a URL stands for as a file or directory on this disk; of a directory, the files whose names fit a pattern."""
    scheme, _, rest = url.partition("://")
    if scheme in ON_DISK:
        return Path(rest)
    return team().from_lead(lambda: _Remote(url).fetch(patterns))


def is_there(url: str) -> bool:
    """Whether a URL names a file of a store."""
    scheme, _, rest = url.partition("://")
    return Path(rest).exists() if scheme in ON_DISK else team().from_lead(lambda: _Remote(url).is_file())


class _Remote:
    """One address of a store."""

    def __init__(self, url: str) -> None:
        self._url = url
        try:
            import fsspec

            self._fs: Any
            self._fs, self._path = fsspec.core.url_to_fs(url)
        except ImportError as problem:
            raise CheckpointError(f"{url}: {one_line(problem)}; install that package beside mergeway") from None
        except ValueError as problem:
            raise CheckpointError(f"{url}: {one_line(problem)}") from None

    def fetch(self, patterns: Sequence[str]) -> Path:
        """The view of what is there now."""
        root = cache_root() / "remote"
        listing = self._asked(lambda: self._list(patterns))
        for address, size, key in listing.values():
            if not (root / "files" / key).exists():
                self._asked(lambda a=address, s=size, k=key: self._download(a, s, root / "files" / k))
        if self._asked(lambda: self._list(patterns)) != listing:
            raise CheckpointError(f"{self._url}: was changed while it was fetched; run again")
        view = kept(root / "views" / _digest([self._url, listing]), lambda stage: _link(stage, root / "files", listing))
        alone = self._name(self._path)
        return view / alone if list(listing) == [alone] and self._fs.isfile(self._path) else view

    def is_file(self) -> bool:
        return bool(self._asked(lambda: self._fs.isfile(self._path)))

    def _list(self, patterns: Sequence[str]) -> Listing:
        self._fs.invalidate_cache()
        if self._fs.isfile(self._path):
            return {self._name(self._path): self._row(self._fs.info(self._path))}
        found: Mapping[str, Mapping[str, object]] = self._fs.find(self._path, detail=True)
        prefix = self._fs._strip_protocol(self._path).rstrip("/") + "/"
        names = {address: self._fs._strip_protocol(address).removeprefix(prefix) for address in found}
        rows = {
            name: self._row(found[address])
            for address, name in sorted(names.items())
            if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
        }
        if not rows:
            raise CheckpointError(f"{self._url}: there is nothing there")
        for name in rows:
            if name.startswith("/") or ".." in name.split("/"):
                raise CheckpointError(f"{self._url}: holds a file '{name}', whose name leads out of its directory")
        return rows

    def _row(self, info: Mapping[str, object]) -> tuple[str, int, str]:
        size = info.get("size")
        if not isinstance(size, int):
            raise CheckpointError(f"{self._url}: the store does not say how large {info['name']} is")
        stamps = {name: str(info[name]) for name in (*_STAMPS, *_TIMES) if info.get(name) is not None}
        # A store that says nothing of a file's content or change is asked for it every time.
        return (
            str(info["name"]),
            size,
            _digest([self._url.partition("://")[0], info["name"], size, stamps or secrets.token_hex()]),
        )

    def _download(self, address: str, size: int, out: Path) -> None:
        make_directory(out.parent)
        part = out.parent / f".{out.name}.partial-{os.getpid()}"
        try:
            self._fs.get_file(address, str(part))
            if part.stat().st_size != size:
                raise CheckpointError(f"{self._url}: was changed while it was fetched; run again")
            os.replace(part, out)
        finally:
            part.unlink(missing_ok=True)

    def _asked(self, question: Callable[[], Any]) -> Any:
        """What the store answers; whatever it has to complain of is one line."""
        try:
            return question()
        except CheckpointError:
            raise
        except FileNotFoundError:
            raise CheckpointError(f"{self._url}: there is nothing there") from None
        except Exception as problem:  # every store has errors of its own
            raise CheckpointError(
                f"{self._url}: cannot be fetched ({type(problem).__name__}: {one_line(problem)})"
            ) from None

    @staticmethod
    def _name(path: str) -> str:
        return path.rstrip("/").rpartition("/")[2]


def _link(stage: Path, files: Path, listing: Listing) -> None:
    for name, (_, _, key) in listing.items():
        make_directory((stage / name).parent)
        try:
            os.link(files / key, stage / name)
        except OSError:  # a file system without links
            copy_file(files / key, stage / name)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:40]
