"""Reading labelled data: npz arrays, a folder of images, parquet tables, JSON lines of text; and a task's head."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mergeway.calibration.lines import as_object, parse_object, read_lines
from mergeway.calibration.pictures import PICTURES, decode
from mergeway.calibration.samples import Samples, check_samples
from mergeway.checkpoint import SafetensorsFiles
from mergeway.errors import OptionError
from mergeway.model.model import ImageModel, Model, TextModel

Array = npt.NDArray[Any]


def read_data(path: Path, task: str, head: Tensor, model: Model) -> Samples:
    """The labelled data of one task from whatever a path holds; training data where a file has both."""
    if path.is_dir():
        return _read_folder(path, task, head, _of_images(path, model))
    if not path.exists():
        raise OptionError(f"{path}: no such file or directory")
    if path.suffix == ".npz":
        return read_npz(path, "train", task, head, _of_images(path, model))
    if path.suffix == ".parquet":
        return _read_parquet(path, task, head, model)
    if path.suffix == ".jsonl":
        if not isinstance(model, TextModel):
            raise OptionError(f"{path}: holds text, but the base is not a text encoder")
        return read_jsonl(path, task, head, model)
    raise OptionError(
        f"{path}: data is an .npz, .parquet or .jsonl file, or a folder with one folder of images a class"
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
    """Images and labels from x_train, y_train, x_test, y_test, or from x and y where there is no split."""
    try:
        # Opened here, because numpy leaves a damaged archive open.
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            pair = (f"x_{split}", f"y_{split}") if f"x_{split}" in file.files else ("x", "y")
            missing = [key for key in pair if key not in file.files]
            if missing:
                raise OptionError(
                    f"{path}: has no array 'x_{split}'; it holds {', '.join(sorted(file.files)) or 'nothing'}"
                )
            x, y = file[pair[0]], file[pair[1]]
    except OSError as problem:
        raise OptionError(f"{path}: cannot be read ({problem.strerror or problem})") from None
    except (ValueError, KeyError, EOFError) as problem:
        raise OptionError(f"{path}: not a readable npz file ({' '.join(str(problem).split())[:120]})") from None
    except Exception as problem:  # a damaged archive shows in as many ways as zip has errors
        if isinstance(problem, OptionError):
            raise
        raise OptionError(f"{path}: not a readable npz file ({type(problem).__name__})") from None
    return _images(f"{path} ({split})", x, y, task, head, model.image_size)


def read_jsonl(path: Path, task: str, head: Tensor, model: TextModel) -> Samples:
    """Texts and labels, one JSON object a line."""
    rows: list[tuple[str, int]] = []
    for number, line in enumerate(read_lines(path), 1):
        row = parse_object(line)
        if row is None or "text" not in row or type(row.get("label")) is not int:
            raise OptionError(f"{path}, line {number}: expected an object with 'text' and an integer 'label'")
        rows.append((str(row["text"]), row["label"]))
    return _texts(str(path), [t for t, _ in rows], [y for _, y in rows], task, head, model)


def _read_parquet(path: Path, task: str, head: Tensor, model: Model) -> Samples:
    """A table with a 'label' column and a column 'image' (encoded bytes, as the datasets library writes it) or 'text'."""
    if isinstance(model, TextModel):
        values, labels = _columns(path, "text")
        return _texts(str(path), [str(v) for v in values], labels, task, head, model)
    values, labels = _columns(path, "image")
    size = _of_images(path, model).image_size
    encoded = [v if (stored := as_object(v)) is None else stored.get("bytes") for v in values]
    pictures = [decode(str(path), data, size) for data in encoded]
    return _images(str(path), _stacked(pictures, size), np.asarray(labels), task, head, size)


def _columns(path: Path, wanted: str) -> tuple[list[Any], list[int]]:
    """A column of inputs and the labels beside it."""
    try:
        parquet: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise OptionError(f"{path}: reading parquet needs pyarrow; pip install 'mergeway[data]'") from None
    try:
        table = parquet.read_table(path)
    except Exception as problem:  # pyarrow has its own hierarchy of errors
        raise OptionError(f"{path}: not a readable parquet file ({' '.join(str(problem).split())[:120]})") from None
    for column in (wanted, "label"):
        if column not in table.column_names:
            raise OptionError(f"{path}: has no column '{column}'; it has {', '.join(table.column_names)}")
    labels: list[Any] = table.column("label").to_pylist()
    for label in labels:
        if type(label) is not int:
            raise OptionError(f"{path}: a label is {label!r}; labels are whole numbers")
    return table.column(wanted).to_pylist(), labels


def _read_folder(path: Path, task: str, head: Tensor, model: ImageModel) -> Samples:
    """One folder a class, in the order of their names."""
    classes = sorted(p for p in path.iterdir() if p.is_dir())
    found = [
        (file, label)
        for label, folder in enumerate(classes)
        for file in sorted(folder.iterdir())
        if file.suffix.lower() in PICTURES
    ]
    if not found:
        raise OptionError(
            f"{path}: no images; expected one folder a class with {', '.join(sorted(PICTURES))} files in it"
        )
    if len(classes) != len(head):
        raise OptionError(f"{path}: {len(classes)} class folders, but the head has {len(head)} classes")
    size = model.image_size
    pictures = [decode(str(file), file.read_bytes(), size) for file, _ in found]
    return _images(str(path), _stacked(pictures, size), np.asarray([y for _, y in found]), task, head, size)


def _stacked(pictures: list[Array], size: int) -> Array:
    return np.stack(pictures) if pictures else np.zeros((0, size, size, 3), np.uint8)


def _images(where: str, x: Array, y: Array, task: str, head: Tensor, size: int) -> Samples:
    grey = x.shape[1:] in ((size, size), (size, size, 1))
    if x.dtype != np.uint8 or not (grey or x.shape[1:] == (size, size, 3)):
        raise OptionError(
            f"{where}: the images are {x.dtype} {list(x.shape)}; the model takes uint8 [n, {size}, {size}, 3], or without the 3 for grey"
        )
    if grey:
        x = np.repeat(np.reshape(x, (-1, size, size, 1)), 3, axis=-1)
    return _checked(where, {"images": torch.as_tensor(x)}, y, task, head)


def _texts(
    where: str, texts: Sequence[str], labels: Sequence[int], task: str, head: Tensor, model: TextModel
) -> Samples:
    return _checked(where, model.encode(texts) if texts else {}, np.asarray(labels, dtype=np.int64), task, head)


def _checked(where: str, inputs: dict[str, Tensor], labels: Array, task: str, head: Tensor) -> Samples:
    if labels.size and not np.issubdtype(labels.dtype, np.integer):
        raise OptionError(f"{where}: labels are {labels.dtype}; they must be whole numbers")
    samples = Samples(task, inputs, torch.as_tensor(labels.astype(np.int64)).reshape(-1), head)
    check_samples(samples, where)
    return samples


def _of_images(path: Path, model: Model) -> ImageModel:
    if not isinstance(model, ImageModel):
        raise OptionError(f"{path}: holds images, but the base is a text encoder")
    return model
