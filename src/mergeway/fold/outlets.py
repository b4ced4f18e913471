"""Where the results of a stream in one go are put: in memory, or in a directory."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

from mergeway.checkpoint import Checkpoint, ModelWriter, SafetensorsFiles, source
from mergeway.checkpoint.writer import DictSink, FileWriter, Sink
from mergeway.core.ranks import team
from mergeway.core.tensors import TensorInfo
from mergeway.fold.folder import Scratch


class InMemory:
    """State and model as tensors in memory."""

    def __init__(self, every: bool = False, keeps: bool = False) -> None:
        self.every, self.keeps = every, keeps

    def state(self, infos: Mapping[str, TensorInfo]) -> Scratch:
        return _MemoryScratch(infos)

    def model(self, infos: Mapping[str, TensorInfo]) -> Sink:
        self.last = DictSink(infos)
        return self.last


class OnDisk:
    """The model in a directory, states in files beside it that are not kept."""

    every = keeps = False

    def __init__(self, stage: Path, shard_size: int) -> None:
        self._stage, self._shard_size, self._numbers = stage, shard_size, itertools.count()

    def state(self, infos: Mapping[str, TensorInfo]) -> Scratch:
        return _DiskScratch(infos, self._stage / f"state-{next(self._numbers)}")

    def model(self, infos: Mapping[str, TensorInfo]) -> Sink:
        self.writer = ModelWriter(self._stage, infos, self._shard_size, digests=False)
        return self.writer


class _MemoryScratch:
    def __init__(self, infos: Mapping[str, TensorInfo]) -> None:
        self.sink = DictSink(infos)

    def read(self) -> Checkpoint:
        return source.InMemory(self.sink.tensors)

    def drop(self) -> None:
        """A caller may still be reading it."""


class _DiskScratch:
    def __init__(self, infos: Mapping[str, TensorInfo], path: Path) -> None:
        self.sink = FileWriter(path, infos, digests=False)
        self._read: Checkpoint | None = None

    def read(self) -> Checkpoint:
        if self._read is None:
            self.sink.finish(sync=False)
            self._read = SafetensorsFiles("scratch", [self.sink.path])
        return self._read

    def drop(self) -> None:
        team().from_lead(self.sink.path.unlink)
