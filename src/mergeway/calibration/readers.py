"""Reading data, with labels or without: npz arrays, a folder of images, parquet tables, JSON lines of text; and a task's head."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from mergeway.calibration.given import Data, arrays_of, is_place, rows_of
from mergeway.calibration.lines import as_object, parse_object, read_arrays, read_lines, read_table
from mergeway.calibration.pictures import PICTURES, decode_all, read_pictures
from mergeway.calibration.samples import UNKNOWN, Samples, check_samples
from mergeway.checkpoint import SafetensorsFiles
from mergeway.checkpoint.source import JsonObject
from mergeway.errors import OptionError
from mergeway.model.model import ImageModel, Model, TextModel

MOST_CLASSES = 1 << 31
Split = Literal["train", "test"]


def read_data(data: Data, task: str, head: Tensor, model: Model, split: Split = "train") -> Samples:
    """The data of one task from whatever a path holds, of the split asked for where it has both, or from values in memory.

    All rows have labels, or none.
    """
    if not is_place(data):
        return _in_memory(data, task, head, model)
    path = Path(data)
    if path.is_dir():
        parted = (path / "train").is_dir() and (path / "test").is_dir()
        return _read_folder(path / split if parted else path, task, head, _of_images(path, model))
    if not path.exists():
        raise OptionError(f"{path}: no such file or directory")
    if path.suffix == ".npz":
        return read_npz(path, split, task, head, _of_images(path, model))
    if path.suffix == ".parquet":
        return _read_parquet(path, task, head, model)
    if path.suffix == ".jsonl":
        if not isinstance(model, TextModel):
            raise OptionError(f"{path}: holds text, but the base is not a text encoder")
        return read_jsonl(path, task, head, model)
    raise OptionError(
        f"{path}: data is an .npz, .parquet or .jsonl file, or a folder of images, with one folder a class where there are labels"
    )


def read_head(path: Path, width: int) -> Tensor:
    """A frozen head: a tensor 'weight' with one row for each class."""
    file = SafetensorsFiles(str(path), [path])
    if "weight" not in file.infos:
        raise OptionError(
            f"{path}: a head holds a tensor 'weight'; this file holds {', '.join(file.infos) or 'nothing'}"
        )
    head = file.read("weight").float()
    if head.ndim != 2 or head.shape[1] != width:
        raise OptionError(
            f"{path}: the head is {list(head.shape)}; the model's features have width {width}, so it must be [classes, {width}]"
        )
    if not bool(torch.isfinite(head).all()):
        raise OptionError(f"{path}: the head holds values that are not finite")
    return head


def read_npz(path: Path, split: str, task: str, head: Tensor, model: ImageModel) -> Samples:
    """Images and labels from x_train, y_train, x_test, y_test, or from x and y where there is no split; images may be alone."""

    def choose(names: list[str]) -> list[str]:
        images, labels = (f"x_{split}", f"y_{split}") if f"x_{split}" in names else ("x", "y")
        if images not in names:
            raise OptionError(f"{path}: has no array 'x_{split}'; it holds {', '.join(sorted(names)) or 'nothing'}")
        return [name for name in (images, labels) if name in names]

    x, y = [*read_arrays(path, choose).values(), None][:2]
    assert x is not None
    return _images(f"{path} ({split})", x, y, task, head, model.image_size)


def read_jsonl(path: Path, task: str, head: Tensor, model: TextModel) -> Samples:
    """Texts, one JSON object a line, with labels or without."""
    lines = ((f"{path}, line {number}", parse_object(line)) for number, line in enumerate(read_lines(path), 1))
    return _labelled_texts(str(path), lines, task, head, model)


def _in_memory(data: Data, task: str, head: Tensor, model: Model) -> Samples:
    where = f"the data of '{task}'"
    if isinstance(model, TextModel):
        return _labelled_texts(where, rows_of(data, task), task, head, model)
    if not isinstance(model, ImageModel):
        raise OptionError(f"{where}: a model of kind {model.kind} reads no values in memory")
    x, y = arrays_of(data, task)
    return _images(where, x, y, task, head, model.image_size)


def _labelled_texts(
    path: str, given: Iterable[tuple[str, JsonObject | None]], task: str, head: Tensor, model: TextModel
) -> Samples:
    rows: list[tuple[str, int | None]] = []
    for where, row in given:
        if row is None or "text" not in row or type(row.get("label", 0)) is not int:
            raise OptionError(f"{where}: expected an object with 'text' and an integer 'label', or none")
        if abs(row.get("label", 0)) >= MOST_CLASSES:
            raise OptionError(f"{where}: the label is out of range; labels count the head's classes from 0")
        rows.append((str(row["text"]), row.get("label")))
        if (rows[0][1] is None) != (rows[-1][1] is None):
            has, first = ("no label", "one") if rows[-1][1] is None else ("a label", "none")
            raise OptionError(f"{where}: has {has}, and the first has {first}; label all or none")
    labels = [label for _, label in rows if label is not None]
    return _texts(path, [text for text, _ in rows], labels or None, task, head, model)


def _read_parquet(path: Path, task: str, head: Tensor, model: Model) -> Samples:
    """A table with a column 'image' (encoded bytes, as the datasets library writes it) or 'text', and perhaps one 'label'."""
    if isinstance(model, TextModel):
        values, labels = _columns(path, "text")
        return _texts(str(path), [str(v) for v in values], labels, task, head, model)
    values, labels = _columns(path, "image")
    size = _of_images(path, model).image_size
    encoded = [v if (stored := as_object(v)) is None else stored.get("bytes") for v in values]
    pictures = decode_all(str(path), encoded, size)
    return _images(str(path), pictures, None if labels is None else np.asarray(labels), task, head, size)


def _columns(path: Path, wanted: str) -> tuple[list[object], list[int] | None]:
    """A column of inputs and the labels beside it, if there are any."""
    table = read_table(path)
    if wanted not in table.column_names:
        raise OptionError(f"{path}: has no column '{wanted}'; it has {', '.join(table.column_names)}")
    values: list[object] = table.column(wanted).to_pylist()
    if "label" not in table.column_names:
        return values, None
    labels: list[int] = table.column("label").to_pylist()
    for label in labels:
        if type(label) is not int:
            raise OptionError(f"{path}: a label is {label!r}; labels are whole numbers, or there is no column 'label'")
    return values, labels


def _read_folder(path: Path, task: str, head: Tensor, model: ImageModel) -> Samples:
    """One folder a class, in the order of their names; or images without labels, in no folder of their own."""
    classes = sorted(p for p in path.iterdir() if p.is_dir())
    labels = [label for label, folder in enumerate(classes) for _ in _pictures_in(folder)]
    found, loose = [file for folder in classes for file in _pictures_in(folder)], _pictures_in(path)
    if not found and not loose:
        raise OptionError(
            f"{path}: no images; expected one folder a class with {', '.join(sorted(PICTURES))} files in it, or such files alone"
        )
    if found and loose:
        raise OptionError(
            f"{path}: {len(loose)} images without a label beside {len(classes)} class folders; label all images or none"
        )
    if found and len(classes) != len(head):
        raise OptionError(f"{path}: {len(classes)} class folders, but the head has {len(head)} classes")
    size = model.image_size
    pictures = read_pictures(found or loose, size)
    return _images(str(path), pictures, np.asarray(labels) if found else None, task, head, size)


def _pictures_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix.lower() in PICTURES)


def _images(where: str, x: np.ndarray, y: np.ndarray | None, task: str, head: Tensor, size: int) -> Samples:
    grey = x.shape[1:] in ((size, size), (size, size, 1))
    if x.dtype != np.uint8 or not (grey or x.shape[1:] == (size, size, 3)):
        raise OptionError(
            f"{where}: the images are {x.dtype} {list(x.shape)}; the model takes uint8 [n, {size}, {size}, 3], or without the 3 for grey"
        )
    if grey:
        x = np.repeat(np.reshape(x, (-1, size, size, 1)), 3, axis=-1)
    return _checked(where, {"images": torch.as_tensor(x)}, y, task, head)


def _texts(
    where: str, texts: Sequence[str], labels: Sequence[int] | None, task: str, head: Tensor, model: TextModel
) -> Samples:
    known = None if labels is None else np.asarray(labels, dtype=np.int64)
    return _checked(where, model.encode(texts) if texts else {}, known, task, head)


def _checked(where: str, inputs: dict[str, Tensor], labels: np.ndarray | None, task: str, head: Tensor) -> Samples:
    if labels is None:
        labels = np.full(max((len(rows) for rows in inputs.values()), default=0), UNKNOWN)
    if labels.size and not np.issubdtype(labels.dtype, np.integer):
        raise OptionError(f"{where}: labels are {labels.dtype}; they must be whole numbers")
    samples = Samples(task, inputs, torch.as_tensor(labels.astype(np.int64)).reshape(-1), head)
    check_samples(samples, where)
    return samples


def _of_images(path: Path, model: Model) -> ImageModel:
    if not isinstance(model, ImageModel):
        raise OptionError(f"{path}: holds images, but the base is a text encoder")
    return model
