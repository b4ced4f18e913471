"""Names for steps of a trunk, in one small file beside the journal: `tags.json`, from name to step."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from mergeway.core.files import contents, reading, replace_text
from mergeway.errors import OptionError, TrunkError

FILE = "tags.json"
_NAME = re.compile(r"(?!\d+$)[\w.-]{1,100}", re.ASCII)


def read_tags(trunk: Path) -> dict[str, int]:
    """The step of every tag."""
    path = trunk / FILE
    with reading(path):
        text = contents(path) if path.exists() else b"{}"
    try:
        found: object = json.loads(text)
        tags = cast("Mapping[str, object]", found) if isinstance(found, dict) else {"": None}
        if all(type(step) is int and _NAME.fullmatch(name) for name, step in tags.items()):
            return cast("dict[str, int]", dict(tags))
    except (ValueError, RecursionError):
        pass
    raise TrunkError(f"{path}: is not a list of tags; restore it from a backup, or remove it to be without tags")


def write_tags(trunk: Path, tags: Mapping[str, int]) -> None:
    """Replace the tags, all at once."""
    replace_text(trunk / FILE, json.dumps(dict(sorted(tags.items())), indent=2) + "\n")


def check_tag(name: str) -> str:
    """A name that no step number can be taken for."""
    if not _NAME.fullmatch(name):
        raise OptionError(
            f"tag {name!r}: a tag is of letters, digits, '.', '_' and '-', at most 100 of them, and not a number alone"
        )
    return name
