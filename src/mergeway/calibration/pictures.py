"""Encoded pictures as a CLIP model wants them: the shorter side resized, the middle cut out."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np

from mergeway.core.files import reading, regular
from mergeway.core.pool import usable_cores
from mergeway.errors import OptionError

# A picture of a few bytes may claim any size; no camera takes one of these.
MAX_PIXELS, MAX_RATIO = 1 << 27, 1000
PICTURES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}

Source = TypeVar("Source")


def read_pictures(paths: Iterable[Path], size: int) -> np.ndarray:
    """The pictures in these files, uint8 [n, size, size, 3]; see `decode`."""
    return _side_by_side(lambda path: _read(path, size), paths, size)


def decode_all(where: str, encoded: Iterable[object], size: int) -> np.ndarray:
    """The pictures, uint8 [n, size, size, 3]; see `decode`."""
    return _side_by_side(lambda data: decode(where, data, size), encoded, size)


def _side_by_side(read: Callable[[Source], np.ndarray], sources: Iterable[Source], size: int) -> np.ndarray:
    """Every core decodes: a test set of photographs takes longer to decode than a GPU takes to look at it."""
    with ThreadPoolExecutor(usable_cores()) as readers:
        pictures = [*readers.map(read, sources)]
    return np.stack(pictures) if pictures else np.zeros((0, size, size, 3), np.uint8)


def _read(path: Path, size: int) -> np.ndarray:
    regular(path)
    with reading(path):
        return decode(str(path), path.read_bytes(), size)


def decode(where: str, data: object, size: int) -> np.ndarray:
    """One picture as uint8 [size, size, 3], exactly as CLIP's own processor resizes and crops it."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise OptionError(f"{where}: reading images needs Pillow; pip install 'mergeway[data]'") from None
    if not isinstance(data, bytes | bytearray):
        raise OptionError(f"{where}: holds something that is not an image")
    try:
        opened = Image.open(io.BytesIO(data))
        if opened.width * opened.height > MAX_PIXELS or max(opened.size) > MAX_RATIO * min(opened.size):
            raise OptionError(f"{where}: a picture of {opened.width} x {opened.height} pixels is too large or too long")
        picture = opened.convert("RGB")
    except Image.DecompressionBombError:
        raise OptionError(f"{where}: holds a picture of too many pixels") from None
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError):
        raise OptionError(f"{where}: holds something that is not an image") from None
    if picture.size == (size, size):
        return np.asarray(picture)
    short = min(picture.size)
    width, height = (size * side // short for side in picture.size)
    left, top = (width - size) // 2, (height - size) // 2
    resized = picture.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(resized.crop((left, top, left + size, top + size)))
