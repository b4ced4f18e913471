"""The lines of a text file that a user gave."""

from __future__ import annotations

from pathlib import Path

from mergeway.errors import OptionError


def read_lines(path: Path) -> list[str]:
    """All of them, or a clear word on why not."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError as problem:
        raise OptionError(f"{path}: cannot be read ({problem.strerror})") from None
    except UnicodeDecodeError as problem:
        raise OptionError(f"{path}: is not UTF-8 text (byte {problem.start})") from None
