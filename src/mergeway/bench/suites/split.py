"""Class- and domain-incremental suites: one labelled dataset cut into tasks, under one shared head."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from mergeway.bench.suite import mean_features
from mergeway.bench.suites.datasets import Known, Reading
from mergeway.bench.suites.description import SuiteJson, TaskJson
from mergeway.bench.suites.orders import class_order, domain_order
from mergeway.calibration.description import CLASSIFIERS
from mergeway.calibration.hub import LABEL_COLUMNS, class_names, column_of, load_split, pick_column
from mergeway.calibration.labelled import Labelled, read_labelled
from mergeway.calibration.readers import read_head
from mergeway.calibration.samples import Samples
from mergeway.checkpoint import open_checkpoint
from mergeway.checkpoint.directory import staged_directory
from mergeway.checkpoint.writer import save_tensors
from mergeway.core.files import copy_file, write_text, writing
from mergeway.errors import OptionError, suggest
from mergeway.model.kinds import ClipVision, kind_of

CUTS = ("classes", "domains")


@dataclass(frozen=True)
class Part:
    """One task of a split: its name, the classes it holds, and the domain it is confined to."""

    name: str
    labels: list[int] | None = None
    domain: int | str | None = None


def class_parts(classes: int, tasks: int, seed: int | None = None, order: Sequence[int] | None = None) -> list[Part]:
    """Contiguous chunks of a fixed class order: the natural one, one that is given, or with a seed a shuffled one.

    A chunk ends where the released code of Holistic CMM ends it: the i-th at ⌊classes·i/tasks⌋.
    """
    if not 1 <= tasks <= classes:
        raise OptionError(f"--tasks {tasks}: {classes} classes make 1 to {classes} tasks")
    if seed is not None:
        order = np.random.default_rng(seed).permutation(classes).tolist()
    taken = range(classes) if order is None else order
    ends = pairwise(classes * i // tasks for i in range(tasks + 1))
    return [Part(f"{a}-{b - 1}" if b - a > 1 else f"{a}", [int(c) for c in taken[a:b]]) for a, b in ends]


def domain_parts(
    values: Sequence[int | str], names: Sequence[str] | None = None, order: Sequence[str] = ()
) -> list[Part]:
    """One task for each domain: first those of the order that is given, then by name; where there are names, the values are
    their places.
    """
    shown = {v: str(names[int(v)]) if names else str(v) for v in values}
    place = {name: k for k, name in enumerate(order)}
    taken = sorted(shown, key=lambda v: (place.get(shown[v].lower(), len(place)), shown[v]))
    return [Part(shown[v].replace(" ", "-").replace("/", "-"), domain=v) for v in taken]


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
) -> SuiteJson:
    """Cut a labelled image dataset into a class- or domain-incremental suite and return its description.

    DATA is an .npz or .parquet file, a folder of images, or a dataset of the hub. Without a head, the frozen head is the
    mean feature of each class under the base.
    """
    if by not in CUTS:
        raise OptionError(f"--by '{by}': {suggest(by, CUTS)}")
    base, out = Path(base).resolve(), Path(out)
    if not base.is_dir():
        raise OptionError(f"{base}: the base must be a model directory")
    if head is not None and not Path(head).is_file():
        raise OptionError(f"{head}: no such file")
    with staged_directory(out) as stage:
        suite = _write(data, out.name, stage, base, by, tasks, seed, Path(head) if head else None, domain)
        suite = completed(suite, experts, classifier)
        write_text(stage / "suite.json", json.dumps(suite, indent=1) + "\n")
    return suite


def _write(
    data: str, name: str, stage: Path, base: Path, by: str, tasks: int, seed: int | None, head: Path | None, domain: str
) -> SuiteJson:
    shared = stage / "head.safetensors"
    found = kind_of(base, head)
    if found["kind"] != ClipVision.kind:
        raise OptionError(f"{base}: a split is of images, so the base must be a CLIP vision model")
    model = ClipVision(base, found)
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
    settings = kind_of(base, shared)
    return {
        "name": name,
        "protocol": "cil" if by == "classes" else "dil",
        "base": str(base),
        "kind": model.kind,
        "logit_scale": settings["logit_scale"],
        "image_mean": settings["image_mean"],
        "image_std": settings["image_std"],
        "tasks": [task_row(part, f"data/{part.name}.npz", "head.safetensors") for part in parts],
    }


def task_row(part: Part, data: str, head: str) -> TaskJson:
    """A task's entry in suite.json."""
    task: TaskJson = {"name": part.name, "data": data, "head": head}
    if part.labels is not None:
        task["labels"] = part.labels
    return task


def completed(suite: SuiteJson, experts: str | Path | None, classifier: str) -> SuiteJson:
    """A suite's description with its experts, found by their tasks' names, and its classifier."""
    if classifier not in CLASSIFIERS:
        raise OptionError(f"--classifier '{classifier}': {suggest(classifier, CLASSIFIERS)}")
    suite = suite.copy()
    if experts is not None:
        root = Path(experts).resolve()
        for task in suite["tasks"]:
            if not (root / task["name"]).exists():
                raise OptionError(f"{root}: has no expert of task '{task['name']}'; expected {root / task['name']}")
        suite["tasks"] = [{**task, "expert": str(root / task["name"])} for task in suite["tasks"]]
    if classifier != "head":
        suite["classifier"] = classifier
    return suite


def hub_parts(known: Known, reading: Reading, tasks: int | None) -> tuple[list[Part], list[str]]:
    """The tasks of a dataset of the hub, by classes or by a domain column, and its class names."""
    if known.classes is not None and known.domain is None:
        order = class_order(known.name, len(known.classes))
        return class_parts(len(known.classes), tasks or 1, order=order), known.classes
    dataset = str(reading["dataset"])
    train = load_split(
        dataset, reading.get("config"), reading.get("train", "train"), reading.get("image"), reading.get("file_prefix")
    )
    names = class_names(train, pick_column(dataset, train, reading.get("label"), LABEL_COLUMNS))
    if known.domain is None:
        return class_parts(len(names), tasks or 1, order=class_order(known.name, len(names))), names
    values = np.unique(column_of(train, known.domain)).tolist()
    declared = getattr(train.features[known.domain], "names", None)
    return domain_parts(values, declared, domain_order(known.name)), names


def _write_part(path: Path, read: Labelled, part: Part) -> None:
    arrays = {}
    for split, (x, y, d) in read.splits.items():
        chosen = np.isin(y, part.labels) if part.labels is not None else d == part.domain
        if not chosen.any():
            raise OptionError(f"{read.source}: task '{part.name}' would have no {split} images; make fewer tasks")
        arrays |= {f"x_{split}": x[chosen], f"y_{split}": y[chosen]}
    with writing(path):
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
