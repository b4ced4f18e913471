"""Writing safetensors files while the tensors are still being worked out: headers first, then blocks in any order of tensors.

The safetensors library writes a file only from all of its tensors at once, which would hold a whole shard in memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from mergeway.checkpoint.mapped import one_line
from mergeway.checkpoint.source import INDEX, spell_dtype
from mergeway.core.files import begin_flush, write_text, writing
from mergeway.core.ranks import team
from mergeway.core.tensors import TensorInfo, as_bytes, begin_digest
from mergeway.errors import CheckpointError, OptionError

DEFAULT_SHARD = 5 * 10**9
FLUSHED_TOGETHER = 1 << 22  # bytes; the disk is asked to begin with so many at once


class Sink(Protocol):
    """Where finished blocks go; blocks of one tensor come in order, tensors in any order and from several threads."""

    def write(self, name: str, start: int, block: Tensor) -> None: ...


class DictSink:
    """Keeps the tensors in memory."""

    def __init__(self, infos: Mapping[str, TensorInfo]) -> None:
        self.tensors = {name: torch.empty(info.shape, dtype=info.dtype) for name, info in infos.items()}

    def write(self, name: str, start: int, block: Tensor) -> None:
        self.tensors[name].view(-1)[start : start + block.numel()] = block.reshape(-1)


class FileWriter:
    """One safetensors file, its place reserved on disk at once, its tensors digested as they pass if they are to be checked later.

    The lead of a team makes the file; every rank writes its own tensors, or its own rows of them, into the same one.
    """

    def __init__(self, path: Path, infos: Mapping[str, TensorInfo], digests: bool = True) -> None:
        self.path = path
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._offsets: dict[str, int] = {}
        offset = 0
        for name, info in infos.items():
            header[name] = {
                "dtype": spell_dtype(info.dtype),
                "shape": list(info.shape),
                "data_offsets": [offset, offset + info.nbytes],
            }
            self._offsets[name] = offset
            offset += info.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._head = len(text).to_bytes(8, "little") + text
        self._infos = dict(infos)
        self._hashes = {name: begin_digest() for name in infos} if digests else {}
        self._passed = dict.fromkeys(infos, 0)  # how many bytes came here in order, and so went into the digest
        # Where the bytes begin and end that no flush has begun with.
        self._pending: dict[str, tuple[int, int]] = dict.fromkeys(infos, (0, 0))
        team().from_lead(lambda: self._make(len(self._head) + offset))
        with writing(path):
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            self._close = weakref.finalize(self, os.close, self._fd)

    def _make(self, size: int) -> None:
        with writing(self.path):
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                _allocate(fd, size)
                _write_at(fd, memoryview(self._head), 0)
            finally:
                os.close(fd)

    def write(self, name: str, start: int, block: Tensor) -> None:
        info = self._infos[name]
        data = as_bytes(block.to(info.dtype).contiguous())
        at = start * info.dtype.itemsize
        if self._hashes and at == self._passed[name]:
            self._hashes[name].update(data)
            self._passed[name] += len(data)
        with writing(self.path):
            _write_at(self._fd, data, len(self._head) + self._offsets[name] + at)
        self._flush_ahead(name, at, at + len(data))

    def _flush_ahead(self, name: str, start: int, stop: int) -> None:
        """The disk works while we do: left to the system, it would begin when a tenth of the memory is full, or at the end."""
        first, last = self._pending[name]
        if start != last:  # the rows of another
            first = start
        if stop - first >= FLUSHED_TOGETHER:
            begin_flush(self._fd, len(self._head) + self._offsets[name] + first, stop - first)
            first = stop
        self._pending[name] = (first, stop)

    def finish(self, sync: bool = True) -> dict[str, str]:
        """The digests of the header ('') and of each tensor, whichever rank wrote it.

        With `sync` the other ranks flush what they wrote, perhaps on other machines; the lead does when it names the stage.
        """
        with writing(self.path):
            if sync and not team().lead:
                os.fsync(self._fd)
        found = self._digests()
        with writing(self.path):
            self._close()
        return {"": hashlib.sha256(self._head).hexdigest(), **found}

    def _digests(self) -> dict[str, str]:
        """Tensors that came whole to one rank were digested there; those written by rows are read once more."""
        if not self._hashes:
            team().gather(None)  # nobody reads the file before everybody has written
            return {}
        whole = {n: h.hexdigest() for n, h in self._hashes.items() if self._passed[n] == self._infos[n].nbytes}
        of_ranks = team().gather({n: d for n, d in whole.items() if self._infos[n].nbytes or team().lead})
        found = {name: digest for mine in of_ranks for name, digest in mine.items()}
        left = [name for name in self._infos if name not in found][team().rank :: team().count]
        if team().count > 1:
            for mine in team().gather({name: self._read_digest(name) for name in left}):
                found |= mine
        return {name: found[name] for name in self._infos}

    def _read_digest(self, name: str) -> str:
        digest, at = begin_digest(), len(self._head) + self._offsets[name]
        end = at + self._infos[name].nbytes
        with writing(self.path):
            while at < end:
                data = os.pread(self._fd, min(end - at, 1 << 22), at)
                digest.update(data)
                at += len(data)
        return digest.hexdigest()


class ModelWriter:
    """A model's weights in a directory: one file, or shards with their index."""

    def __init__(
        self, directory: Path, infos: Mapping[str, TensorInfo], shard_size: int = DEFAULT_SHARD, digests: bool = True
    ) -> None:
        shards = _plan(infos, shard_size)
        total = len(shards)
        self._files: dict[str, FileWriter] = {}
        weight_map = {}
        for number, names in enumerate(shards, 1):
            label = "model.safetensors" if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"
            writer = FileWriter(directory / label, {n: infos[n] for n in names}, digests)
            self._files.update(dict.fromkeys(names, writer))
            weight_map.update(dict.fromkeys(names, label))
        self._index: dict[str, dict[str, str]] = {}
        if total > 1:
            size = sum(i.nbytes for i in infos.values())
            text = json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2) + "\n"
            team().from_lead(lambda: write_text(directory / INDEX, text))
            self._index = {INDEX: {"": hashlib.sha256(text.encode()).hexdigest()}}

    def write(self, name: str, start: int, block: Tensor) -> None:
        self._files[name].write(name, start, block)

    def finish(self) -> dict[str, dict[str, str]]:
        """The digests of every file: file name -> ('' for its header or a whole small file, or tensor name) -> its digest."""
        return self._index | {w.path.name: w.finish() for w in dict.fromkeys(self._files.values())}


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """A safetensors file of tensors that are all at hand, in a stage."""
    with writing(path):
        try:
            save_file(
                {name: tensor.contiguous() for name, tensor in tensors.items()}, path, dict(metadata or {}) or None
            )
        except SafetensorError as problem:  # the library's name for a full disk, too
            raise CheckpointError(f"{path}: cannot be written ({one_line(problem)})") from None


def _plan(infos: Mapping[str, TensorInfo], shard_size: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, info in infos.items():
        if shards[-1] and filled + info.nbytes > shard_size:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += info.nbytes
    return shards


def read_size(text: str) -> int:
    """Bytes from a size such as 5GB, 500MB or 2GiB."""
    units = {
        "": 1,
        "B": 1,
        "KB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
        "TB": 10**12,
        "KIB": 2**10,
        "MIB": 2**20,
        "GIB": 2**30,
    }
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    size = int(float(match[1]) * units[match[2].upper()]) if match and match[2].upper() in units else 0
    if size <= 0:
        raise OptionError(f"--shard-size is '{text}'; it takes a size such as 5GB or 500MB")
    return size


def _allocate(fd: int, size: int) -> None:
    """Give a new file its size; where the system can, with room on the disk, so that a full one is told at once."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
    else:  # macOS
        os.ftruncate(fd, size)


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
