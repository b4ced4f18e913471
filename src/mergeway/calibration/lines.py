"""The lines of a text file that a user gave, and the objects in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from mergeway.errors import OptionError


def read_lines(path: Path) -> list[str]:
    """All of them, or a clear word on why not."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError as problem:
        raise OptionError(f"{path}: cannot be read ({problem.strerror})") from None
    except UnicodeDecodeError as problem:
        raise OptionError(f"{path}: is not UTF-8 text (byte {problem.start})") from None


def parse_object(line: str) -> dict[str, Any] | None:
    """The JSON object of a line; None when it is anything else."""
    try:
        return as_object(json.loads(line))
    except ValueError:
        return None


def as_object(value: object) -> dict[str, Any] | None:
    """A value of a JSON file as an object; None when it is anything else."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None
