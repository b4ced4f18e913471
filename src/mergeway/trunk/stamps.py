"""What a trunk remembers of a base that it has digested, so that files that have not changed are not digested again.

    base.seen    the size, times and inode of each of the base's files when they were opened, and the digests of their tensors

A hint like `base.json`, no part of the history: the digests in it must add up to that of the base, and anything else in it that is
wrong costs one more pass over the base. `verify` does not look at it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from mergeway.checkpoint import Checkpoint, Inspection, SafetensorsFiles
from mergeway.checkpoint.inspect import combine_digests
from mergeway.checkpoint.mapped import MappedFile
from mergeway.core.files import contents, replace_text
from mergeway.core.ranks import team
from mergeway.errors import MergewayError

SEEN = "base.seen"
# A file that was written so shortly before it was opened may be written again without another time; file systems count
# in steps of up to two seconds.
TOO_FRESH = 2 * 10**9


@dataclass(frozen=True)
class Stamps:
    """When the files of a checkpoint were opened, and of each its size, its two times of change, its inode and its device."""

    opened: int
    files: Mapping[str, list[int]]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Stamps:
        """Those of a checkpoint that was just opened; of one that lies in no safetensors files there are none."""
        files = checkpoint.files if isinstance(checkpoint, SafetensorsFiles) else []
        return cls(time.time_ns(), {str(file.path.absolute()): _status(file) for file in files})

    def vouch_for(self, later: Stamps) -> bool:
        """Whether the files are what they were: none has changed since, and none was too fresh then."""
        fresh = self.opened - TOO_FRESH
        return bool(self.files) and self.files == later.files and all(f[2] < fresh for f in self.files.values())


def _status(file: MappedFile) -> list[int]:
    s = file.status
    return [s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino, s.st_dev]


def known_digests(trunk: Path, now: Stamps, checkpoint: Checkpoint, digest: str) -> Mapping[str, str] | None:
    """The digests of the tensors of a base whose files are those that the trunk has seen; all ranks must find the same."""
    found: dict[str, str] | None = None
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        seen = json.loads(contents(trunk / SEEN))
        tensors = dict(seen["tensors"])
        if Stamps(seen["opened"], seen["files"]).vouch_for(now) and tensors.keys() == checkpoint.infos.keys():
            found = tensors if combine_digests(tensors, checkpoint.infos) == digest else None
    return found if all(team().gather(found is not None)) else None


def stamp_text(opened: Stamps, seen: Inspection) -> str:
    """The file that says what was opened, and what was found in it."""
    return json.dumps({**asdict(opened), "tensors": seen.tensors}, indent=1) + "\n"


def renew_stamps(trunk: Path, opened: Stamps, seen: Inspection) -> None:
    """Remember a base that had to be digested again; a disk that has no room for it only costs time."""
    if team().lead:
        with contextlib.suppress(OSError, MergewayError):
            replace_text(trunk / SEEN, stamp_text(opened, seen))
