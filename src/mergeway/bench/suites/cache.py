"""Where suites that are made from elsewhere are kept, and how a directory in there appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def cache_root() -> Path:
    """$MERGEWAY_CACHE, or mergeway in the user's cache directory."""
    said = os.environ.get("MERGEWAY_CACHE")
    return Path(said) if said else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mergeway"


def kept(folder: Path, make: Callable[[Path], None]) -> Path:
    """A directory that is made once; two processes that make it at the same time do not mix."""
    if not folder.exists():
        part = folder.with_name(f".{folder.name}.{os.getpid()}")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            make(part)
            try:
                os.replace(part, folder)
            except OSError:  # the other process was faster
                if not folder.exists():
                    raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder
