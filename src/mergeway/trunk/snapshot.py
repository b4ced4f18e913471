"""The snapshot of one step, believed only as far as its digests go.

The journal's record holds the hash of digests.json, and that file the digests of all others: of a safetensors file its
header's and every tensor's, of any other the whole file's. A tensor is digested when it is first read.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path

from torch import Tensor

from mergeway.checkpoint.source import SafetensorsFiles
from mergeway.core.files import contents, copy_file, reading, regular, writing
from mergeway.core.progress import SILENT, Progress
from mergeway.core.tensors import TensorInfo, digest_tensor
from mergeway.errors import MergewayError, TrunkError
from mergeway.trunk.journal import Record

STATE = "state.safetensors"
DIGESTS = "digests.json"
MAX_HEADER = 100_000_000  # as the safetensors library has it

# The digests of a snapshot: file -> ('' for the header, SHA-256; or a tensor's name, BLAKE3).
Digests = dict[str, dict[str, str]]
# `map`, or that of a pool.
Each = Callable[[Callable[[str], bool], Iterable[str]], Iterable[bool]]


class Snapshot:
    """The files of a step that has a record."""

    def __init__(self, path: Path, record: Record) -> None:
        self.path = path
        self._record = record

    @cached_property
    def digests(self) -> Digests:
        """What the files were when the step was committed."""
        listing = self.path / DIGESTS
        with reading(listing):
            text = contents(listing)
        if hashlib.sha256(text).hexdigest() != self._record.files:
            raise self._changed(f"{listing}: was changed")
        return json.loads(text)

    def model(self) -> Checked:
        """The deployed weights."""
        names = sorted(n for n in self.digests if n.startswith("model") and n.endswith(".safetensors"))
        if not names:
            raise TrunkError(f"{self.path}: holds no weights")
        return self._checked(names)

    def state(self) -> Checked:
        """The rule's state."""
        return self._checked([STATE])

    def _checked(self, names: list[str]) -> Checked:
        for name in names:
            if problem := header_problem(self.path / name, self.digests[name][""]):
                raise self._changed(problem)
        tensors = {t: (self.path / n, d) for n in names for t, d in self.digests[n].items() if t}
        source = f"{self.path.parent.parent} step {self._record.step}"
        return Checked(SafetensorsFiles(source, [self.path / n for n in names], self.path), tensors, self._changed)

    def check(self, wanted: Callable[[str], bool], each: Each = map) -> None:
        """Refuse the snapshot if one of these files was changed, is gone, or was not there when it was committed."""
        for name in sorted(_present(self.path) - set(self.digests)):
            if wanted(name):
                raise TrunkError(f"{self.path / name}: does not belong to the snapshot; remove it")
        for name in filter(wanted, self.digests):
            for problem in file_problems(self.path / name, self.digests[name], each):
                raise self._changed(problem)

    def link_into(self, stage: Path, wanted: Callable[[str], bool] = lambda _: True, each: Each = map) -> Digests:
        """The files once more in the stage of another step, as links where the file system has them."""
        self.check(wanted, each)
        digests = {name: listed for name, listed in self.digests.items() if wanted(name)}
        with writing(stage):
            for name in digests:
                try:
                    os.link(self.path / name, stage / name)
                except OSError:
                    copy_file(self.path / name, stage / name)
        return digests

    def directory(self, files: str) -> Path | None:
        """Where the files are whose names begin so, checked; None where the step is the bare base."""
        if not self._record.files:
            return None
        self.check(lambda name: name.startswith(files))
        return self.path

    def problems(self, each: Each = map, progress: Progress = SILENT) -> list[str]:
        """Everything that is not as it was committed, one line each."""
        listing = self.path / DIGESTS
        if not listing.exists():
            return [f"{listing}: is missing"]
        try:
            digests = self.digests
        except TrunkError:
            return [f"{listing}: was changed after step {self._record.step} was committed"]
        extra = sorted(_present(self.path) - set(digests))
        problems = [f"{self.path / name}: does not belong to the snapshot" for name in extra]
        for name, expected in digests.items():
            problems += file_problems(self.path / name, expected, each, progress)
        return problems

    def _changed(self, problem: str) -> TrunkError:
        return TrunkError(
            f"{problem} after step {self._record.step} was committed; go back with 'rollback' or restore the file from a backup"
        )


class Checked:
    """Tensors of a snapshot; each is digested when it is first read, once, whatever thread asks."""

    def __init__(
        self,
        stored: SafetensorsFiles,
        expected: Mapping[str, tuple[Path, str]],
        refusal: Callable[[str], MergewayError],
    ) -> None:
        self.source, self.directory = stored.source, stored.directory
        self.infos: Mapping[str, TensorInfo] = stored.infos
        self._stored, self._expected, self._refusal = stored, expected, refusal
        self._locks = {name: threading.Lock() for name in stored.infos}
        self._sound: set[str] = set()

    def expect(self, name: str) -> None:
        self._stored.expect(name)

    def read(self, name: str) -> Tensor:
        tensor = self._stored.read(name)
        if name not in self._sound:
            with self._locks[name]:
                if name not in self._sound:
                    path, digest = self._expected[name]
                    if digest_tensor(tensor) != digest:
                        raise self._refusal(f"{path}: tensor '{name}' was changed")
                    self._sound.add(name)
        return tensor


def header_problem(path: Path, expected: str) -> str | None:
    """What is wrong with the header of a safetensors file; it decides where the tensors are."""
    if not path.exists():
        return f"{path}: is missing"
    regular(path)
    with reading(path), open(path, "rb") as file:
        length = file.read(8)
        head = length + file.read(min(int.from_bytes(length, "little"), MAX_HEADER))
    if hashlib.sha256(head).hexdigest() != expected:
        return f"{path}: the header (the first {len(head)} bytes) was changed"
    return None


def file_problems(path: Path, expected: Mapping[str, str], each: Each = map, progress: Progress = SILENT) -> list[str]:
    """Everything in a file that is not as it was committed, one line each."""
    if not path.exists():
        return [f"{path}: is missing"]
    progress.begin(f"verifying {path.name}", path.stat().st_size, "bytes")
    if path.suffix != ".safetensors":
        with reading(path):
            digest = hashlib.sha256(contents(path)).hexdigest()
        return [] if digest == expected[""] else [f"{path}: was changed"]
    if problem := header_problem(path, expected[""]):
        return [problem]
    try:
        stored = SafetensorsFiles(str(path), [path])
    except MergewayError as problem:
        return [str(problem)]

    def differs(name: str) -> bool:
        progress.advance(stored.infos[name].nbytes)
        return digest_tensor(stored.read(name)) != expected[name]

    names = [n for n in expected if n]
    return [f"{path}: tensor '{n}' was changed" for n, bad in zip(names, each(differs, names), strict=True) if bad]


def _present(directory: Path) -> set[str]:
    with reading(directory):
        return {p.name for p in directory.iterdir()} - {DIGESTS}
