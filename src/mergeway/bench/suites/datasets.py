"""The datasets that named suites are made of: where they lie on the hub, their classes, and the prompts of each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypedDict


class _Located(TypedDict):
    dataset: str | None


class Reading(_Located, total=False):
    """How a dataset of the hub is read: its id, and where they are not the usual ones, config, splits and columns."""

    config: str
    train: str
    test: str
    image: str
    label: str
    file_prefix: str
    names: list[str]
    labels: list[int] | None
    where: dict[str, int | str | None]


@dataclass(frozen=True)
class Known:
    """One dataset: how to read it, its prompts with {} for the class, its classes where they are fixed, its domain column."""

    name: str
    reading: Reading
    templates: list[str]
    classes: list[str] | None
    domain: str | None


@cache
def known_datasets() -> dict[str, Known]:
    """All of them, from datasets.json."""
    listed = json.loads((Path(__file__).parent / "datasets.json").read_text(encoding="utf-8"))
    known = {}
    for name, entry in listed.items():
        classes = entry.pop("classes", None)
        templates, domain = entry.pop("templates"), entry.pop("domain", None)
        known[name] = Known(name, entry, templates, classes.split("|") if classes else None, domain)
    return known
