"""The arrays of an npz file, looked at before they are unpacked: a small file may claim or become anything."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from mergeway.core.files import regular
from mergeway.errors import OptionError

# No picture, text or table packs as well as this; what does is nothing but repetition.
MOST_UNPACKED, MOST_RATIO = 1 << 28, 100


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
