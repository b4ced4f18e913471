"""A whole labelled image dataset in memory, to be cut into tasks: arrays, class folders, a table, or a dataset of the hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mergeway.calibration.hub import (
    HOLDOUT,
    LABEL_COLUMNS,
    HubPictures,
    class_names,
    column_of,
    load_split,
    open_rows,
    pick_column,
)
from mergeway.calibration.lines import read_arrays
from mergeway.calibration.pictures import PICTURES, read_pictures
from mergeway.checkpoint.source import JsonObject
from mergeway.errors import OptionError

# Images uint8 [n, side, side, 3], labels, and the domain of each row where there are domains.
Rows = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Labelled:
    """Training and test rows of a dataset."""

    source: str
    splits: dict[str, Rows]

    @property
    def classes(self) -> int:
        return 1 + max(int(y.max()) for _, y, _ in self.splits.values())

    def domain_values(self) -> list[int | str]:
        """The domains that occur."""
        return np.unique(self.splits["train"][2]).tolist()


def read_labelled(source: str, size: int, domain: str | None = None) -> Labelled:
    """Read all of a dataset; `domain` names the column, or array, that says where a row is from.

    Where there is no test split, a fifth of the rows is held out by a fixed seed.
    """
    path = Path(source)
    if path.suffix == ".npz" and path.exists():
        splits = _from_npz(path, size, domain)
    elif path.is_dir() and not any(path.rglob("*.parquet")):
        splits = _from_folder(path, size, domain is not None)
    else:
        splits = _from_table(source, size, domain)
    for split, (x, y, _) in splits.items():
        if not len(x):
            raise OptionError(f"{source}: there are no {split} images")
        if int(y.min()) < 0:
            raise OptionError(f"{source}: label {int(y.min())} is out of range; labels count from 0")
    return Labelled(source, splits)


def _from_npz(path: Path, size: int, domain: str | None) -> dict[str, Rows]:
    arrays = read_arrays(path, lambda names: names)
    parted = "x_train" in arrays
    splits: dict[str, Rows] = {}
    for split in ("train", "test") if parted else ("all",):
        keys = [f"{k}_{split}" if parted else k for k in ("x", "y", *([domain] if domain else []))]
        missing = [key for key in keys if key not in arrays]
        if missing:
            raise OptionError(f"{path}: has no array '{missing[0]}'; it holds {', '.join(sorted(arrays))}")
        x, y, *rest = (arrays[key] for key in keys)
        if x.dtype != np.uint8 or x.shape[1:3] != (size, size) or y.dtype.kind not in "iu" or len(x) != len(y):
            raise OptionError(
                f"{path}: {keys[0]} is {x.dtype} {list(x.shape)} and {keys[1]} {y.dtype} {list(y.shape)}; expected uint8 [n, {size}, {size}, 3] and n whole numbers"
            )
        if x.ndim == 3 or x.shape[-1] == 1:
            x = np.repeat(np.reshape(x, (-1, size, size, 1)), 3, axis=-1)
        splits[split] = (x, y.astype(np.int64), rest[0] if rest else np.zeros(len(y), np.int64))
    return splits if parted else _part(splits["all"])


def _from_folder(path: Path, size: int, domains: bool) -> dict[str, Rows]:
    """[train|test /] [domain /] class / picture."""
    parted = (path / "train").is_dir() and (path / "test").is_dir()
    roots = {"train": path / "train", "test": path / "test"} if parted else {"all": path}
    found: dict[str, list[Path]] = {}
    for split, root in roots.items():
        places = sorted(p for p in root.glob("*/*" if domains else "*") if p.is_dir())
        found[split] = [f for p in places for f in sorted(p.iterdir()) if f.suffix.lower() in PICTURES]
    names = sorted({file.parent.name for files in found.values() for file in files})
    if not names:
        layout = "domain/class/picture" if domains else "class/picture"
        raise OptionError(f"{path}: no images; expected {layout}, or the same below train and test")
    splits: dict[str, Rows] = {}
    for split, files in found.items():
        y = [names.index(f.parent.name) for f in files]
        domain = np.asarray([f.parent.parent.name for f in files])
        splits[split] = (read_pictures(files, size), np.asarray(y, np.int64), domain)
    return splits if parted else _part(splits["all"])


def _from_table(source: str, size: int, domain: str | None) -> dict[str, Rows]:
    """A parquet file or a dataset of the hub, both through the datasets library."""
    description: JsonObject = {"dataset": source}
    if source.endswith(".parquet"):
        if not Path(source).exists():
            raise OptionError(f"{source}: no such file")
        description["test"] = None
    first = load_split(source, None, "train")
    description["names"] = class_names(first, pick_column(source, first, None, LABEL_COLUMNS))
    splits: dict[str, Rows] = {}
    for split in ("train", "test"):
        rows, image, labels = open_rows(description, split)
        pixels = HubPictures(source, rows, image, size, np.arange(len(labels))).load().numpy()
        where = column_of(rows, domain) if domain else np.zeros(len(labels), np.int64)
        splits[split] = (pixels, labels, where)
    return splits


def _part(rows: Rows) -> dict[str, Rows]:
    order = np.random.default_rng(0).permutation(len(rows[1]))
    cut = len(order) // HOLDOUT
    parted = {"train": np.sort(order[cut:]), "test": np.sort(order[:cut])}
    return {split: (rows[0][i], rows[1][i], rows[2][i]) for split, i in parted.items()}
