"""Samples as a compact parquet table: one row a sample, every tensor of a row as bytes in the smallest integer type that holds it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from mergeway.calibration.samples import Samples
from mergeway.core.files import writing
from mergeway.errors import OptionError, TrunkError

# For each column of a task: the dtype its bytes are in, the dtype they become again, and the shape of a row.
Columns = dict[str, tuple[str, str, list[int]]]
_LABELS, _ANSWERS, _TOPS = "labels", "answers", "tops"


def write_rows(path: Path, tasks: Sequence[Samples]) -> list[Columns]:
    """Write the samples of all tasks; says how each task's bytes are to be read."""
    arrow, parquet = load_pyarrow()
    described: list[Columns] = []
    columns: dict[str, list[bytes | None]] = {}
    names: list[str] = []
    for task in tasks:
        packed = {key: _narrow(value) for key, value in _tensors(task).items()}
        described.append(
            {k: (_spell(p.dtype), _spell(_tensors(task)[k].dtype), list(p.shape[1:])) for k, p in packed.items()}
        )
        for key, values in packed.items():
            filled = columns.setdefault(key, [])
            filled += [None] * (len(names) - len(filled))
            filled += [row.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for row in values]
        names += [task.task] * len(task)
    data: dict[str, object] = {"task": arrow.array(names, arrow.string()).dictionary_encode()}
    for key, values in columns.items():
        data[key] = arrow.array(values + [None] * (len(names) - len(values)), arrow.binary())
    with writing(path):
        parquet.write_table(arrow.table(data), path, compression="zstd", compression_level=9, use_dictionary=["task"])
    return described


def read_rows(path: Path, described: Mapping[str, Columns]) -> dict[str, Samples]:
    """The samples of every task, as they were written."""
    _, parquet = load_pyarrow()
    try:
        table = parquet.read_table(path)
        names = table.column("task").to_pylist()
        found: dict[str, Samples] = {}
        for task, columns in described.items():
            index = [i for i, name in enumerate(names) if name == task]
            rows = table.take(index)
            tensors = {
                key: _widen(rows.column(key).to_pylist(), stored, dtype, shape)
                for key, (stored, dtype, shape) in columns.items()
            }
            inputs = {k.removeprefix("inputs/"): t for k, t in tensors.items() if k.startswith("inputs/")}
            answers, tops = tensors.get(_ANSWERS), tensors.get(_TOPS)
            found[task] = Samples(task, inputs, tensors[_LABELS], shuffled=True, answers=answers, tops=tops)
    except Exception as problem:  # pyarrow has its own hierarchy of errors
        raise TrunkError(
            f"{path}: the calibration samples cannot be read ({' '.join(str(problem).split())[:120]})"
        ) from None
    return found


def _tensors(task: Samples) -> dict[str, Tensor]:
    tensors = {**{f"inputs/{key}": value for key, value in task.tensors.items()}, _LABELS: task.labels}
    return tensors | {k: t for k, t in ((_ANSWERS, task.answers), (_TOPS, task.tops)) if t is not None}


def _narrow(tensor: Tensor) -> Tensor:
    """Whole numbers in as few bytes as they need; anything else as it is."""
    if tensor.is_floating_point() or tensor.dtype is torch.bool or not tensor.numel():
        return tensor
    low, high = int(tensor.min()), int(tensor.max())
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32):
        if torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max:
            return tensor.to(dtype)
    return tensor


def _widen(rows: list[bytes], stored: str, dtype: str, shape: Sequence[int]) -> Tensor:
    raw = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8) if rows else torch.empty(0, dtype=torch.uint8)
    return raw.view(getattr(torch, stored)).reshape(len(rows), *shape).to(getattr(torch, dtype))


def _spell(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def load_pyarrow() -> tuple[ModuleType, ModuleType]:
    """The library and its parquet module, or one line that names the extra; call it before work that ends in a table."""
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise OptionError(
            "keeping calibration samples needs pyarrow; pip install 'mergeway[data]', or keep none with --no-memory"
        ) from None
