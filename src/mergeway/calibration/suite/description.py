"""A directory's suite.json, checked for everything that can be checked without reading the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mergeway.calibration.suite.suite import Suite
from mergeway.calibration.suite.task import CLASSIFIERS, PROTOCOLS, SuiteTask
from mergeway.checkpoint.source import read_json
from mergeway.errors import OptionError, suggest
from mergeway.model.compute import Compute
from mergeway.model.encoders import KINDS


def load_suite(path: str | Path, tests: int | None = None, compute: Compute | None = None) -> Suite:
    """The suite in a directory."""
    path = Path(path)
    file = path / "suite.json"
    if not file.exists():
        raise OptionError(f"{path}: not a suite (no suite.json)")
    settings = read_json(file, "the suite's description")
    for key in ("name", "kind", "base", "tasks"):
        if key not in settings:
            raise OptionError(f"{file}: the entry '{key}' is missing")
    if settings["kind"] not in KINDS:
        raise OptionError(f"{file}: kind '{settings['kind']}' is unknown; {suggest(str(settings['kind']), KINDS)}")
    for key in KINDS[settings["kind"]]:
        if key not in settings:
            raise OptionError(f"{file}: a suite of kind {settings['kind']} needs the entry '{key}'")
    if not isinstance(settings["tasks"], list) or not settings["tasks"]:
        raise OptionError(f"{file}: 'tasks' must be a list with at least one task")
    tasks = [_read_task(file, path, number, row) for number, row in enumerate(settings["tasks"])]
    _check_protocol(file, settings, tasks)
    names = [t.name for t in tasks]
    if len(set(names)) < len(names):
        raise OptionError(f"{file}: two tasks have the name '{next(n for n in names if names.count(n) > 1)}'")
    if not (path / settings["base"]).exists():
        raise OptionError(f"{file}: the base {path / settings['base']} does not exist")
    return Suite(path, settings, tasks, tests, compute)


def _read_task(file: Path, path: Path, number: int, row: Any) -> SuiteTask:
    if not isinstance(row, dict):
        raise OptionError(f"{file}: task {number} is not an object")
    for key in ("name", "data", "head", *(["expert"] if "expert" in row else [])):
        if not isinstance(row.get(key), str):
            raise OptionError(f"{file}: task {number} has no text entry '{key}'")
    for key in ("expert", "head"):
        if key in row and not (path / row[key]).exists():
            raise OptionError(f"{file}: {key} {path / row[key]} of task '{row['name']}' does not exist")
    labels = row.get("labels")
    if labels is not None and not (isinstance(labels, list) and labels and all(type(y) is int for y in labels)):
        raise OptionError(f"{file}: 'labels' of task '{row['name']}' must be a list of whole numbers, rows of the head")
    arrives = path / row["expert"] if "expert" in row else None
    return SuiteTask(
        row["name"], arrives, path / row["data"], path / row["head"], tuple(labels) if labels is not None else None
    )


def _check_protocol(file: Path, settings: Mapping[str, Any], tasks: Sequence[SuiteTask]) -> None:
    for key, known in (("protocol", PROTOCOLS), ("classifier", CLASSIFIERS)):
        said = settings.get(key, known[0])
        if said not in known:
            raise OptionError(f"{file}: {key} '{said}' is unknown; {suggest(str(said), known)}")
    protocol = settings.get("protocol", "task")
    if protocol == "task":
        return
    if len({t.head for t in tasks}) > 1:
        raise OptionError(f"{file}: a suite of protocol {protocol} has one head; name the same file in every task")
    if protocol == "cil":
        owner: dict[int, str] = {}
        for task in tasks:
            if task.labels is None:
                raise OptionError(
                    f"{file}: task '{task.name}' needs 'labels', the rows of the head that are its classes"
                )
            for label in task.labels:
                if label in owner:
                    raise OptionError(f"{file}: class {label} is in '{owner[label]}' and in '{task.name}'")
                owner[label] = task.name
