"""What a file of data holds: lines, objects, rows of a table, arrays; looked at before it is unpacked, since it may claim anything."""

from __future__ import annotations

import importlib
import json
import math
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from mergeway.checkpoint.source import JsonObject
from mergeway.core.files import regular
from mergeway.errors import OptionError

ROWS_AT_ONCE = 128
# No picture, text or table packs as well as this; what does is nothing but repetition.
MOST_UNPACKED, MOST_RATIO = 1 << 28, 100


def read_lines(path: Path) -> list[str]:
    """All of them, or a clear word on why not."""
    regular(path)
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError as problem:
        raise OptionError(f"{path}: cannot be read ({problem.strerror})") from None
    except UnicodeDecodeError as problem:
        raise OptionError(f"{path}: is not UTF-8 text (byte {problem.start})") from None


def parse_object(line: str) -> JsonObject | None:
    """The JSON object of a line; None when it is anything else."""
    try:
        return as_object(json.loads(line))
    except (ValueError, RecursionError):
        return None


def as_object(value: object) -> JsonObject | None:
    """A value of a JSON file as an object; None when it is anything else."""
    return cast(JsonObject, value) if isinstance(value, dict) else None


def read_objects(path: Path) -> Iterator[tuple[str, JsonObject | None]]:
    """The rows of a file of JSON lines or of a parquet table, each with where it is; empty lines are passed over."""
    if path.suffix == ".parquet":
        for number, row in enumerate(read_table(path).to_pylist(), 1):
            # A table has every column in every row; one without a value is not there.
            yield f"{path}, row {number}", {key: value for key, value in row.items() if value is not None}
        return
    for number, line in enumerate(read_lines(path), 1):
        if line:
            yield f"{path}, line {number}", parse_object(line)


def read_table(path: Path) -> Any:
    """A parquet file as a table of pyarrow."""
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise OptionError(f"{path}: reading parquet needs pyarrow; pip install 'mergeway[data]'") from None
    regular(path)
    try:
        with parquet.ParquetFile(path) as file:
            return _bounded(path, file)
    except OptionError:
        raise
    except Exception as problem:  # pyarrow has its own hierarchy of errors
        raise OptionError(f"{path}: not a readable parquet file ({' '.join(str(problem).split())[:120]})") from None


def _bounded(path: Path, file: Any) -> Any:
    """All rows, a few at a time: a value stands in a file once, however many rows name it."""
    packed, read = path.stat().st_size, 0
    batches: list[Any] = []
    check_unpacked(path, 8 * file.metadata.num_rows, packed)  # what a row takes at least, once it is read
    arrow = importlib.import_module("pyarrow")
    for batch in file.iter_batches(ROWS_AT_ONCE):
        columns = [c.dictionary_decode() if arrow.types.is_dictionary(c.type) else c for c in batch.columns]
        batches.append(arrow.RecordBatch.from_arrays(columns, names=batch.schema.names))
        read += batches[-1].nbytes
        check_unpacked(path, read, packed)
    return arrow.Table.from_batches(batches) if batches else file.read()


def read_arrays(path: Path, choose: Callable[[list[str]], Sequence[str]]) -> dict[str, np.ndarray]:
    """The arrays that `choose` picks among the names in a file."""
    regular(path)
    try:
        # Opened here, because numpy leaves a damaged archive open.
        with open(path, "rb") as raw, zipfile.ZipFile(raw) as archive:
            members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
            chosen = choose(list(members))
            return {name: _read(path, archive, members[name]) for name in chosen}
    except OptionError:
        raise
    except OSError as problem:
        raise OptionError(f"{path}: cannot be read ({problem.strerror or problem})") from None
    except (ValueError, KeyError, EOFError) as problem:
        raise OptionError(f"{path}: not a readable npz file ({' '.join(str(problem).split())[:120]})") from None
    except Exception as problem:  # a damaged archive shows in as many ways as zip has errors
        raise OptionError(f"{path}: not a readable npz file ({type(problem).__name__})") from None


def _read(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    check_unpacked(path, member.file_size, member.compress_size)
    with archive.open(member) as file:
        claimed = _claimed(file)
    if claimed > member.file_size:
        raise OptionError(
            f"{path}: '{member.filename}' claims {claimed} bytes and has {member.file_size}; get it again"
        )
    with archive.open(member) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def _claimed(file: IO[bytes]) -> int:
    """How many bytes the values of an array take, by its header."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("an array of Python objects")
    if any(side < 0 for side in shape):
        raise ValueError(f"an array of shape {list(shape)}")
    return math.prod(shape) * dtype.itemsize


def check_unpacked(path: Path, size: int, packed: int) -> None:
    """Refuse what unpacks to much more than it is."""
    if size > MOST_UNPACKED and size > MOST_RATIO * packed:
        raise OptionError(
            f"{path}: unpacks to {size} bytes from {packed}; that is no data, but the same value over and over"
        )
