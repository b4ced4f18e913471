"""Data as a caller gives it: where a file is, or values in memory; of one task, or of several by their names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, cast

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mergeway.calibration.lines import read_objects
from mergeway.calibration.samples import Samples
from mergeway.checkpoint.source import JsonObject
from mergeway.errors import OptionError
from mergeway.model.model import Settings

Array = npt.NDArray[Any]
# What columns of values in memory may be called; any other mapping is of tasks.
_INPUTS = ("x", "image", "text", "prompt", "messages")
_COLUMNS = (*_INPUTS, "y", "label", "completion", "answer", "choices")


@dataclass(frozen=True)
class Prepared:
    """Samples that were read already, and the settings of the model that reads them so."""

    settings: Settings
    samples: Samples


# A file, a folder or SUITE#TASK; columns by name; rows, such as texts, objects or a `datasets.Dataset`.
Data = str | Path | Prepared | JsonObject | Iterable[Any]
# Of the arrival alone, or by task.
ByTask = Data | Mapping[str, Data] | None
# The same of heads, which are files.
HeadByTask = str | Path | Mapping[str, str] | Mapping[str, Path] | Mapping[str, str | Path] | None


def by_task(given: ByTask, arrival: str) -> dict[str, Data]:
    """What was given, by the names of tasks; what has no name is of the arrival."""
    if given is None:
        return {}
    return dict(given) if is_by_task(given) else {arrival: given}


def heads_by_task(given: HeadByTask, arrival: str) -> dict[str, Path]:
    """The files of heads, by the names of tasks."""
    if given is None:
        return {}
    return (
        {arrival: Path(given)} if isinstance(given, str | Path) else {name: Path(file) for name, file in given.items()}
    )


def is_by_task(given: object) -> TypeGuard[Mapping[str, Data]]:
    """Whether data is given by task: a mapping that is not one of columns."""
    if not isinstance(given, Mapping):
        return False
    columns = cast("Mapping[object, object]", given)
    return not (
        any(name in columns for name in _INPUTS)
        and all(name in _COLUMNS for name in columns)
        and not any(isinstance(value, str | Path | Mapping) for value in columns.values())
    )


def is_place(data: Data) -> TypeGuard[str | Path]:
    """Whether data is somewhere on the disk."""
    return isinstance(data, str | Path)


def rows_of(data: Data, task: str) -> Iterator[tuple[str, JsonObject | None]]:
    """The rows of a file, or of values in memory, each with where it is; a bare text is the row that has it as `text`."""
    if is_place(data):
        yield from read_objects(Path(data))
        return
    rows: Iterable[Any] = (
        _from_columns(cast("JsonObject", data), task) if isinstance(data, Mapping) else cast("Iterable[Any]", data)
    )
    for number, row in enumerate(rows, 1):
        where = f"the data of '{task}', row {number}"
        if isinstance(row, Mapping):
            yield where, {k: v for k, v in cast("JsonObject", row).items() if v is not None}
        else:
            yield where, {"text": row} if isinstance(row, str) else None


def arrays_of(data: Data, task: str) -> tuple[Array, Array | None]:
    """Images and labels of values in memory: arrays or tensors `x` and `y`, or pictures and labels row by row."""
    x: Any
    y: Any
    if isinstance(data, Mapping):
        columns = cast("JsonObject", data)
        x, y = columns.get("x", columns.get("image")), columns.get("y", columns.get("label"))
    elif isinstance(data, np.ndarray | Tensor):
        x, y = cast("Any", data), None
    else:
        rows = [row for _, row in rows_of(data, task)]
        x = [row["image"] if row is not None and "image" in row else None for row in rows]
        y = [row["label"] for row in rows if row is not None and "label" in row] or None
    if x is None or (isinstance(x, list) and any(picture is None for picture in cast("list[Any]", x))):
        raise OptionError(
            f"the data of '{task}': there are no images; give arrays x and y, or rows with image and label"
        )
    images, labels = _array(x), None if y is None else _array(y)
    if labels is not None and len(labels) != len(images):
        raise OptionError(
            f"the data of '{task}': {len(images)} images and {len(labels)} labels; label all images or none"
        )
    return images, labels


def _array(values: Any) -> Array:
    if isinstance(values, Tensor):
        return values.detach().cpu().numpy()
    if isinstance(values, list):
        return np.stack([np.asarray(value) for value in cast("list[Any]", values)])
    return np.asarray(values)


def _from_columns(columns: JsonObject, task: str) -> list[JsonObject]:
    lists: dict[str, list[Any]] = {
        name: _array(values).tolist() if isinstance(values, np.ndarray | Tensor) else list(values)
        for name, values in columns.items()
    }
    counts = {name: len(values) for name, values in lists.items()}
    if len(set(counts.values())) > 1:
        lengths = ", ".join(f"{count} of '{name}'" for name, count in counts.items())
        raise OptionError(f"the data of '{task}': the columns are of different lengths: {lengths}")
    return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
