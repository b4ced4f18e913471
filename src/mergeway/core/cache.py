"""Where what comes from elsewhere is kept, and how a directory in there appears whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from mergeway.core.stages import staged
from mergeway.errors import CheckpointError


def cache_root() -> Path:
    """$MERGEWAY_CACHE, or mergeway in the user's cache directory."""
    chosen = os.environ.get("MERGEWAY_CACHE")
    return Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mergeway"


def kept(folder: Path, make: Callable[[Path], object]) -> Path:
    """A directory that is written once; two processes that write it at the same time do not mix."""
    if not folder.exists():
        try:
            with staged(folder) as stage:
                make(stage)
        except CheckpointError:
            if not folder.exists():  # else the other process was faster
                raise
    return folder
