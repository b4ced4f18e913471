"""A suite.json, its tasks and words, checked for everything that can be checked without reading the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from mergeway.calibration.lines import as_object
from mergeway.checkpoint.source import JsonObject, read_json
from mergeway.errors import OptionError, suggest
from mergeway.model.kinds import ENCODERS, SUITE_KINDS

PROTOCOLS = ("task", "cil", "dil")
CLASSIFIERS = ("head", "nearest-mean")
MOST_SCALE, MOST_TOKENS = 1e6, 1 << 16
MEASURES = ("accuracy", "exact", "choices")


@dataclass(frozen=True)
class SuiteTask:
    """One task: the expert that arrives, the data it is judged on, its frozen head, and which of the head's rows are its own.

    A language model has no head. `measure` says what it is judged by; by default choices, else exact match, else next tokens.
    """

    name: str
    arrives: Path | None
    data: Path
    head: Path | None
    labels: tuple[int, ...] | None = None
    measure: str | None = None

    @property
    def expert(self) -> Path:
        """The task's expert; a suite may leave it to be trained."""
        if self.arrives is None:
            raise OptionError(
                f"task '{self.name}' comes without an expert; train one with 'mergeway finetune', and name it as 'expert' in suite.json"
            )
        return self.arrives

    def is_of(self, ref: str | Path) -> bool:
        """Whether a checkpoint is the task's expert, or a directory named after the task."""
        path = Path(ref)
        return path.name == self.name or (self.arrives is not None and path.resolve() == self.arrives.resolve())


def read_description(path: Path) -> tuple[JsonObject, list[SuiteTask]]:
    """The settings and the tasks of the suite in a directory."""
    file = path / "suite.json"
    if not file.exists():
        raise OptionError(f"{path}: not a suite (no suite.json)")
    settings = read_json(file, "the suite's description")
    for key in ("name", "kind", "base", "tasks"):
        if key not in settings:
            raise OptionError(f"{file}: the entry '{key}' is missing")
    for key in ("name", "kind", "base"):
        if not isinstance(settings[key], str):
            raise OptionError(f"{file}: the entry '{key}' is {_shown(settings[key])}; it must be a text")
    if settings["kind"] not in SUITE_KINDS:
        raise OptionError(
            f"{file}: kind '{settings['kind']}' is unknown; {suggest(str(settings['kind']), SUITE_KINDS)}"
        )
    for key in SUITE_KINDS[settings["kind"]].needs:
        if key not in settings:
            raise OptionError(f"{file}: a suite of kind {settings['kind']} needs the entry '{key}'")
    _check_numbers(file, settings)
    rows: list[object] = settings["tasks"]
    if type(rows) is not list or not rows:
        raise OptionError(f"{file}: 'tasks' must be a list with at least one task")
    headed = settings["kind"] in ENCODERS
    tasks = [_read_task(file, path, number, row, headed) for number, row in enumerate(rows)]
    _check_protocol(file, settings, tasks)
    names = [t.name for t in tasks]
    if len(set(names)) < len(names):
        raise OptionError(f"{file}: two tasks have the name '{next(n for n in names if names.count(n) > 1)}'")
    if not (path / settings["base"]).exists():
        raise OptionError(f"{file}: the base {path / settings['base']} does not exist")
    return settings, tasks


def _check_numbers(file: Path, settings: JsonObject) -> None:
    """Settings that are numbers are such as a model can be run with."""
    wanted = {
        "logit_scale": ("a number above 0", _above(0.0)),
        "image_mean": ("three numbers", _three(-MOST_SCALE)),
        "image_std": ("three numbers above 0", _three(1 / MOST_SCALE)),
        "max_length": (f"a whole number from 1 to {MOST_TOKENS}", _whole),
    }
    for key, (what, fits) in wanted.items():
        if key in settings and not fits(settings[key]):
            raise OptionError(f"{file}: the entry '{key}' is {_shown(settings[key])}; it must be {what}")


def _above(least: float) -> Callable[[object], bool]:
    return lambda v: isinstance(v, int | float) and not isinstance(v, bool) and least < v <= MOST_SCALE


def _three(least: float) -> Callable[[object], bool]:
    def fits(value: object) -> bool:
        values = cast("list[object]", value) if isinstance(value, list) else []
        return len(values) == 3 and all(map(_above(least), values))

    return fits


def _whole(value: object) -> bool:
    return type(value) is int and 0 < value <= MOST_TOKENS


def _shown(value: object) -> str:
    return repr(value)[:80]


def _read_task(file: Path, path: Path, number: int, entry: object, headed: bool) -> SuiteTask:
    row = as_object(entry)
    if row is None:
        raise OptionError(f"{file}: task {number} is not an object")
    if "head" in row and not headed:
        raise OptionError(f"{file}: task '{row.get('name')}' has a head, but a language model needs none; leave it out")
    for key in ("name", "data", *(["head"] if headed else []), *(["expert"] if "expert" in row else [])):
        if not isinstance(row.get(key), str):
            raise OptionError(f"{file}: task {number} has no text entry '{key}'")
    for key in ("expert", "head"):
        if key in row and not (path / row[key]).exists():
            raise OptionError(f"{file}: {key} {path / row[key]} of task '{row['name']}' does not exist")
    labels: list[int] | None = row.get("labels")
    if labels is not None and not _whole_numbers(labels):
        raise OptionError(f"{file}: 'labels' of task '{row['name']}' must be a list of whole numbers, rows of the head")
    measure = row.get("measure")
    if measure is not None and (headed or measure not in MEASURES):
        raise OptionError(
            f"{file}: 'measure' of task '{row['name']}' is {measure!r}; it is for language models: {', '.join(MEASURES)}"
        )
    arrives = path / row["expert"] if "expert" in row else None
    head = path / row["head"] if headed else None
    chosen = tuple(labels) if labels is not None else None
    return SuiteTask(row["name"], arrives, path / row["data"], head, chosen, measure)


def _whole_numbers(values: list[int]) -> bool:
    return type(values) is list and bool(values) and all(type(y) is int for y in values)


def _check_protocol(file: Path, settings: Mapping[str, object], tasks: Sequence[SuiteTask]) -> None:
    for key, known in (("protocol", PROTOCOLS), ("classifier", CLASSIFIERS)):
        word = settings.get(key, known[0])
        if word not in known:
            raise OptionError(f"{file}: {key} '{word}' is unknown; {suggest(str(word), known)}")
    protocol = settings.get("protocol", "task")
    if protocol != "task" and settings["kind"] not in ENCODERS:
        raise OptionError(f"{file}: a suite of kind {settings['kind']} has no shared head; leave out 'protocol'")
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
