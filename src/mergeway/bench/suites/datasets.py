"""The datasets that named suites are made of: where they lie on the hub, their classes, and the prompts of each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Known:
    """One dataset: how to read it, its prompts with {} for the class, its classes where they are fixed, its domain column."""

    name: str
    reading: dict[str, Any]
    templates: list[str]
    classes: list[str] | None
    domain: str | None


@cache
def known_datasets() -> dict[str, Known]:
    """All of them, from datasets.json."""
    rows = json.loads((Path(__file__).parent / "datasets.json").read_text(encoding="utf-8"))
    made = {}
    for name, row in rows.items():
        classes = row.pop("classes", None)
        templates, domain = row.pop("templates"), row.pop("domain", None)
        made[name] = Known(name, row, templates, classes.split("|") if classes else None, domain)
    return made
