"""A safetensors file mapped into memory, read only.

The safetensors library maps a file private and writable, which counts as the process's own memory wherever that is limited
(`RLIMIT_DATA`, strict overcommit), though not one page of it ever is. So the library checks the file, and the bytes come
from a mapping of our own.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mergeway.core.files import reading, regular
from mergeway.core.tensors import TensorInfo
from mergeway.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


class MappedFile:
    """The tensors of one safetensors file; a write into one crashes the process, so copy it first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        regular(path)
        with reading(path), _well_formed(path):
            # The library's checks of the header: sizes, dtypes, offsets without gaps. For NumPy it maps nothing writable.
            names = safe_open(path, framework="np").keys()
            with open(path, "rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size), object_pairs_hook=self._unique)
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self.status = os.fstat(file.fileno())
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            self._bytes = torch.frombuffer(mapped, dtype=torch.uint8).untyped_storage()
        self._start = 8 + size
        self._offsets = {name: header[name]["data_offsets"] for name in names}
        self.infos = {name: self._info(name, header[name]) for name in names}

    def read(self, name: str) -> Tensor:
        """One tensor, not copied."""
        info = self.infos[name]
        start, stop = (self._start + offset for offset in self._offsets[name])
        return torch.asarray(self._bytes[start:stop], dtype=torch.uint8).view(info.dtype).reshape(info.shape)

    def expect(self, name: str) -> None:
        """Have the system read a tensor from the disk while we do something else; what goes wrong shows when it is read."""
        if not hasattr(os, "posix_fadvise"):  # macOS
            return
        start, stop = (self._start + offset for offset in self._offsets[name])
        with contextlib.suppress(OSError):
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(fd, start, stop - start, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(fd)

    def _info(self, name: str, entry: dict) -> TensorInfo:
        if not name:
            raise CheckpointError(f"{self.path}: holds a tensor without a name")
        if entry["dtype"] not in DTYPES:
            raise CheckpointError(
                f"{self.path}: tensor '{name}' has dtype {entry['dtype']}; supported: {', '.join(DTYPES)}"
            )
        return TensorInfo(tuple(entry["shape"]), DTYPES[entry["dtype"]])

    def _unique(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        """The library takes the last of two entries with one name without a word."""
        seen = dict(pairs)
        if len(seen) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{self.path}: the header names '{twice}' twice; get the file again")
        return seen


@contextlib.contextmanager
def _well_formed(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        if path.exists():  # the library takes any file that it cannot look at for none
            raise CheckpointError(f"{path}: cannot be read, though it is there; run again") from None
        raise
    except (SafetensorError, ValueError) as problem:  # ValueError: a file that became shorter cannot be mapped
        raise CheckpointError(
            f"{path}: not a readable safetensors file ({one_line(problem)}); get the file again"
        ) from None


def one_line(problem: Exception) -> str:
    """The message of another library's error, short and without line breaks."""
    return " ".join(str(problem).split())[:200]
