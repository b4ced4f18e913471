"""Class- and domain-incremental suites: one labelled dataset cut into tasks, under one shared head."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mergeway.bench.suite import mean_features
from mergeway.calibration.description import CLASSIFIERS
from mergeway.calibration.hub import LABEL_COLUMNS, class_names, column_of, load_split, pick_column
from mergeway.calibration.labelled import Labelled, read_labelled
from mergeway.calibration.readers import read_head
from mergeway.calibration.samples import Samples
from mergeway.checkpoint import open_checkpoint
from mergeway.checkpoint.directory import staged_directory
from mergeway.checkpoint.writer import save_tensors
from mergeway.core.files import copy_file, write_text
from mergeway.errors import OptionError, suggest
from mergeway.model.kinds import ClipVision, kind_of, make_model

WAYS = ("classes", "domains")


@dataclass(frozen=True)
class Part:
    """One task of a split: its name, the classes it holds, and the domain it is confined to."""

    name: str
    labels: list[int] | None = None
    domain: Any = None


def class_parts(classes: int, tasks: int, seed: int | None = None) -> list[Part]:
    """Contiguous chunks of a fixed class order: the natural one, or with a seed a shuffled one; as even as can be."""
    if not 1 <= tasks <= classes:
        raise OptionError(f"--tasks {tasks}: {classes} classes make 1 to {classes} tasks")
    order = np.arange(classes) if seed is None else np.random.default_rng(seed).permutation(classes)
    chunks = np.array_split(order, tasks)
    starts = np.cumsum([0, *map(len, chunks)])
    names = [f"{a}-{b - 1}" if b - a > 1 else f"{a}" for a, b in pairwise(starts)]
    return [Part(name, [int(c) for c in chunk]) for name, chunk in zip(names, chunks, strict=True)]


def domain_parts(values: Sequence[Any], names: Sequence[str] | None = None) -> list[Part]:
    """One task for each domain, in the order of their names."""
    shown: dict[Any, str] = {v: str(names[v]) if names else str(v) for v in values}
    return [Part(shown[v].replace(" ", "-").replace("/", "-"), domain=v) for v in sorted(shown, key=lambda v: shown[v])]


def split_suite(
    data: str,
    out: str | Path,
    base: str | Path,
    *,
    by: str = "classes",
    tasks: int = 5,
    seed: int | None = None,
    head: str | Path | None = None,
    domain: str = "domain",
    experts: str | Path | None = None,
    classifier: str = "head",
) -> dict[str, Any]:
    """Cut a labelled image dataset into a class- or domain-incremental suite and return its description.

    DATA is an .npz or .parquet file, a folder of images, or a dataset of the hub. Without a head, the frozen head is the
    mean feature of each class under the base.
    """
    if by not in WAYS:
        raise OptionError(f"--by '{by}': {suggest(by, WAYS)}")
    base, out = Path(base).resolve(), Path(out)
    if not base.is_dir():
        raise OptionError(f"{base}: the base must be a model directory")
    if head is not None and not Path(head).is_file():
        raise OptionError(f"{head}: no such file")
    with staged_directory(out) as stage:
        made = _write(data, stage, base, by, tasks, seed, Path(head) if head else None, domain)
        made = completed({"name": out.name, **made}, experts, classifier)
        write_text(stage / "suite.json", json.dumps(made, indent=1) + "\n")
    return made


def _write(
    data: str, stage: Path, base: Path, by: str, tasks: int, seed: int | None, head: Path | None, domain: str
) -> dict[str, Any]:
    shared = stage / "head.safetensors"
    model = make_model(base, kind_of(base, head))
    if not isinstance(model, ClipVision):
        raise OptionError(f"{base}: a split is of images, so the base must be a CLIP vision model")
    read = read_labelled(data, model.image_size, domain if by == "domains" else None)
    if head:
        copy_file(head, shared)
    else:
        save_tensors(shared, {"weight": _mean_head(model, base, read)})
    classes = len(read_head(shared, model.width))
    parts = class_parts(classes, tasks, seed) if by == "classes" else domain_parts(read.domain_values())
    (stage / "data").mkdir()
    for part in parts:
        _write_part(stage / "data" / f"{part.name}.npz", read, part)
    return {
        "protocol": "cil" if by == "classes" else "dil",
        "base": str(base),
        **kind_of(base, shared),
        "tasks": [task_row(part, f"data/{part.name}.npz", "head.safetensors") for part in parts],
    }


def task_row(part: Part, data: str, head: str) -> dict[str, Any]:
    """A task's entry in suite.json."""
    row: dict[str, Any] = {"name": part.name, "data": data, "head": head}
    return row | ({"labels": part.labels} if part.labels is not None else {})


def completed(suite: dict[str, Any], experts: str | Path | None, classifier: str) -> dict[str, Any]:
    """A suite's description with its experts, found by their tasks' names, and its classifier."""
    if classifier not in CLASSIFIERS:
        raise OptionError(f"--classifier '{classifier}': {suggest(classifier, CLASSIFIERS)}")
    rows = suite["tasks"]
    if experts is not None:
        root = Path(experts).resolve()
        for row in rows:
            if not (root / row["name"]).exists():
                raise OptionError(f"{root}: has no expert of task '{row['name']}'; expected {root / row['name']}")
        rows = [{**row, "expert": str(root / row["name"])} for row in rows]
    chosen = {"classifier": classifier} if classifier != "head" else {}
    return {**suite, **chosen, "tasks": rows}


def hub_parts(said: dict[str, Any], tasks: int | None, domain: str | None) -> tuple[list[Part], list[str]]:
    """The tasks of a dataset of the hub, by classes or by a domain column, and its class names."""
    rows = load_split(said["dataset"], said.get("config"), said.get("train", "train"))
    names = class_names(rows, pick_column(said["dataset"], rows, said.get("label"), LABEL_COLUMNS))
    if domain is None:
        return class_parts(len(names), tasks or 1), names
    values = np.unique(column_of(rows, domain)).tolist()
    return domain_parts(values, getattr(rows.features[domain], "names", None)), names


def _write_part(path: Path, read: Labelled, part: Part) -> None:
    arrays = {}
    for split, (x, y, d) in read.splits.items():
        rows = np.isin(y, part.labels) if part.labels is not None else d == part.domain
        if not rows.any():
            raise OptionError(f"{read.source}: task '{part.name}' would have no {split} images; make fewer tasks")
        arrays |= {f"x_{split}": x[rows], f"y_{split}": y[rows]}
    np.savez_compressed(path, **arrays)


def _mean_head(model: ClipVision, base: Path, read: Labelled) -> torch.Tensor:
    x, y, _ = read.splits["train"]
    checkpoint = open_checkpoint(base)
    params = {n: checkpoint.read(n).float() for n, i in checkpoint.infos.items() if i.merges}
    samples = Samples("all", {"images": torch.from_numpy(x)}, torch.from_numpy(y))
    with torch.no_grad():
        head, seen = mean_features(model, params, [samples], read.classes)
    if not bool(seen.all()):
        raise OptionError(f"{read.source}: class {int((~seen).nonzero()[0])} has no training images; give --head")
    return head
