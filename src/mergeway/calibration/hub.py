"""Datasets of the hub as a task's data: a description in a small JSON file, rows that are decoded when they are looked at.

{"dataset": "org/name" or a directory, "config": null, "train": "train", "test": "test", "image": "image", "label": "label"}

`test` may be null: a fifth of the rows, drawn by a fixed seed, is held out. `labels` keeps the rows of some classes, `where`
those with a value in a column; `names` gives the classes in order when the label column holds names instead of numbers.
`file_prefix` names a column to be made of what the pictures' file names begin with, up to the first underscore.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mergeway.calibration.lines import as_object
from mergeway.calibration.pictures import decode_all
from mergeway.calibration.samples import Samples, check_samples
from mergeway.checkpoint.source import JsonObject, read_json
from mergeway.errors import OptionError

IMAGE_COLUMNS = ("image", "img", "jpg", "png", "webp")
LABEL_COLUMNS = ("label", "fine_label", "labels", "cls")
HOLDOUT = 5  # one row in five is for testing where a dataset has no test split
_KEYS = {"dataset", "config", "train", "test", "image", "label", "labels", "where", "names", "file_prefix"}


class Table(Protocol):
    """What is asked of a split of the datasets library."""

    @property
    def column_names(self) -> list[str]: ...

    @property
    def features(self) -> Mapping[str, object]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: list[int] | slice) -> Mapping[str, Sequence[object]]: ...

    def select(self, indices: np.ndarray) -> Table: ...

    def select_columns(self, names: list[str]) -> Table: ...


class HubPictures:
    """Rows of a dataset that become pixels only when a model looks at them, so that a task may be larger than memory."""

    def __init__(self, where: str, rows: Table, column: str, size: int, index: np.ndarray) -> None:
        self._where, self._rows, self._column, self._size, self._index = where, rows, column, size, index

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: slice | Tensor) -> HubPictures:
        chosen = index if isinstance(index, slice) else index.numpy()
        return HubPictures(self._where, self._rows, self._column, self._size, self._index[chosen])

    def load(self) -> Tensor:
        """The pixels, uint8 [n, size, size, 3]."""
        values: Sequence[object] = self._rows[self._index.tolist()][self._column] if len(self) else []
        return torch.as_tensor(decode_all(self._where, map(_bytes, values), self._size))


def read_hub(path: Path, split: str, task: str, head: Tensor, size: int) -> Samples:
    """The train or test rows that a description file names."""
    description = read_json(path, "the description of a dataset")
    if not isinstance(description.get("dataset"), str) or description.keys() - _KEYS:
        unknown = ", ".join(sorted(description.keys() - _KEYS))
        raise OptionError(f"{path}: {f'unknown entries {unknown}' if unknown else 'the entry dataset is missing'}")
    where = f"{description['dataset']} ({split})"
    rows, image, labels = open_rows(description, split)
    index = np.arange(len(labels))
    if description.get("labels") is not None:
        index = index[np.isin(labels, description["labels"])]
    conditions: JsonObject = description.get("where") or {}
    for column, value in conditions.items():
        index = index[column_of(rows, column)[index] == value]
    pictures = HubPictures(where, rows, image, size, index)
    samples = Samples(task, {"images": pictures}, torch.as_tensor(labels[index]), head)
    check_samples(samples, where)
    return samples


def open_rows(description: JsonObject, split: str) -> tuple[Table, str, np.ndarray]:
    """The rows of a split with their pictures undecoded, the picture column, and the labels as numbers."""
    source, config = description["dataset"], description.get("config")
    name = description.get(split, split)
    wanted, prefix = description.get("image"), description.get("file_prefix")
    everything = load_split(source, config, name or description.get("train", "train"), wanted, prefix)
    if name is None or description.get("test", "test") is None:
        everything = _held_out(everything, split)
    image = pick_column(source, everything, wanted, IMAGE_COLUMNS)
    label = pick_column(source, everything, description.get("label"), LABEL_COLUMNS)
    return everything, image, _numbers(source, column_of(everything, label), description.get("names"))


@lru_cache(maxsize=64)
def load_split(
    source: str, config: str | None, split: str, image: str | None = None, file_prefix: str | None = None
) -> Table:
    """One split of a dataset: from the hub cache where it was downloaded, otherwise as the library finds it.

    `file_prefix` adds a column of what the file names of the `image` column begin with, unless there is one of that name.
    """
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise OptionError(f"{source}: datasets of the hub need a library; pip install 'mergeway[hub]'") from None
    datasets.disable_progress_bars()
    try:
        if source.endswith(".parquet"):
            rows = datasets.load_dataset("parquet", data_files=source, split=split)
        else:
            rows = datasets.load_dataset(_snapshot(source), config, split=split)
    except ValueError as problem:  # no such configuration or split
        raise OptionError(f"{source}: {_one_line(problem)}") from None
    except Exception as problem:  # offline, gated, absent, damaged: the library has a class for each
        raise OptionError(
            f"{source}: not in the hub cache and not to be had ({_one_line(problem)}); download it with 'hf download --repo-type dataset {source}'"
        ) from None
    for name, feature in rows.features.items():
        if isinstance(feature, datasets.Image):
            rows = rows.cast_column(name, datasets.Image(decode=False))
    if file_prefix and file_prefix not in rows.column_names:
        stored = rows.data.column(pick_column(source, rows, image, IMAGE_COLUMNS))
        files = [file for chunk in stored.chunks for file in chunk.field("path").to_pylist()]
        if not all(files):
            raise OptionError(
                f"{source}: has no column '{file_prefix}', and its pictures have no file names to tell it by"
            )
        rows = rows.add_column(file_prefix, [Path(file).name.split("_")[0] for file in files])
    return rows


def _snapshot(source: str) -> str:
    """The directory of a dataset that 'hf download' fetched, or the name itself for the library to look up."""
    if Path(source).exists():
        return source
    huggingface_hub = importlib.import_module("huggingface_hub")
    try:
        found = Path(huggingface_hub.snapshot_download(source, repo_type="dataset", local_files_only=True))
    except Exception:  # not there, or not an id: the library says it better
        return source
    # The library itself leaves a snapshot with nothing but the card.
    return str(found) if any(p.suffix in (".parquet", ".tar", ".arrow") for p in found.rglob("*")) else source


def pick_column(source: str, rows: Table, wanted: str | None, usual: Sequence[str]) -> str:
    """The named column, or the first of the usual ones."""
    for name in [wanted] if wanted else usual:
        if name in rows.column_names:
            return name
    raise OptionError(
        f"{source}: has no column '{wanted or usual[0]}'; it has {', '.join(rows.column_names)}, so name it in the description"
    )


def class_names(rows: Table, label: str) -> list[str]:
    """The classes in the order of their numbers: as the dataset declares them, or the sorted values of a text column."""
    declared = getattr(rows.features[label], "names", None)
    values = column_of(rows, label)
    if declared:
        return list(declared)
    return [str(v) for v in (np.unique(values) if values.dtype.kind in "UO" else range(int(values.max()) + 1))]


def column_of(rows: Table, name: str) -> np.ndarray:
    """All values of a column."""
    if name not in rows.column_names:
        raise OptionError(f"the dataset has no column '{name}'; it has {', '.join(rows.column_names)}")
    return np.asarray(rows.select_columns([name])[:][name])


def _numbers(source: str, values: np.ndarray, names: Sequence[str] | None) -> np.ndarray:
    if values.dtype.kind in "UO":
        if not names:
            raise OptionError(
                f"{source}: the labels are words; give the classes in order as 'names' in the description"
            )
        number = {name: k for k, name in enumerate(names)}
        unknown = sorted({str(v) for v in values} - number.keys())
        if unknown:
            raise OptionError(f"{source}: the label '{unknown[0]}' is none of the {len(number)} classes")
        return np.array([number[str(v)] for v in values], dtype=np.int64)
    if values.dtype.kind not in "iub":
        raise OptionError(f"{source}: labels are {values.dtype}; they must be whole numbers or names")
    return values.astype(np.int64)


def _held_out(rows: Table, split: str) -> Table:
    order = np.random.default_rng(0).permutation(len(rows))
    cut = len(rows) // HOLDOUT
    return rows.select(np.sort(order[:cut] if split == "test" else order[cut:]))


def _bytes(value: object) -> object:
    stored = as_object(value)
    if stored is None:
        return value
    return stored["bytes"] if stored.get("bytes") is not None else Path(str(stored.get("path"))).read_bytes()


def _one_line(problem: Exception) -> str:
    return " ".join(str(problem).split())[:160]
