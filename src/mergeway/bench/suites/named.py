"""Suites by name: what each is made of, and the directory that holds it, made when first asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mergeway.bench.suites.clip import Clip
from mergeway.bench.suites.datasets import Reading, known_datasets
from mergeway.bench.suites.description import SuiteJson, TaskJson
from mergeway.bench.suites.embedded import EMBEDDED, embedded
from mergeway.bench.suites.handwritten import INCREMENTAL, incremental, write_incremental
from mergeway.bench.suites.split import completed, hub_parts, task_row
from mergeway.bench.suites.trained import TRAINED, trained_directory
from mergeway.checkpoint.directory import staged_directory
from mergeway.core.cache import cache_root
from mergeway.core.files import make_directory, replace_text
from mergeway.errors import OptionError, suggest

BACKBONES = {
    "b32": "openai/clip-vit-base-patch32",
    "b16": "openai/clip-vit-base-patch16",
    "l14": "openai/clip-vit-large-patch14",
}
# In the order of FusionBench: the first 8 and 14 are suites of their own.
CLIP_TASKS = (
    *("sun397", "stanford-cars", "resisc45", "eurosat", "svhn", "gtsrb", "mnist", "dtd"),
    *("oxford_flowers102", "pcam", "fer2013", "oxford-iiit-pet", "stl10", "cifar100"),
    *("cifar10", "food101", "fashion_mnist", "emnist_letters", "kmnist", "rendered-sst2"),
)
INCREMENTAL_BACKBONE = "b16"  # Section 5.1, Holistic CMM
SPLITS = {"cifar100": (10, 20, 50), "imagenet-r": (5, 10, 20), "cub-200": (5, 10, 20), "cars": (5, 10, 20)}
DOMAINS = ("office-31", "office-home", "domainnet", "imagenet-r-domains")
LONGER = ("cub-200", "stanford-cars")  # 30 epochs a task instead of 10
# How the experts of FusionBench were trained, and continual fine-tuning is (Appendices B and C.1, OPCM): Adam, a cosine, no decay.
CLIP_TRAINING: dict[str, float | str] = {
    "steps": 4000,
    "lr": 1e-5,
    "batch": 128,
    "weight_decay": 0.0,
    "warmup": 0.0,
    "clip": 1e6,  # none
    "freeze": "^visual_projection",
}


@dataclass(frozen=True)
class Recipe:
    """What a suite of the hub is made of."""

    name: str
    protocol: str
    backbone: str
    datasets: tuple[str, ...]
    tasks: int | None = None


def recipes() -> dict[str, Recipe]:
    """All suites that are made from the hub."""
    found = [
        Recipe(f"clip-vit-{short}-{n}", "task", BACKBONES[short], CLIP_TASKS[:n], n)
        for short in BACKBONES
        for n in (8, 14, 20)
    ]
    backbone = BACKBONES[INCREMENTAL_BACKBONE]
    for name, counts in SPLITS.items():
        dataset = "stanford-cars" if name == "cars" else name
        found += [Recipe(f"{name}-{n}", "cil", backbone, (dataset,), n) for n in counts]
    found += [Recipe(name, "dil", backbone, (name,)) for name in DOMAINS]
    return {recipe.name: recipe for recipe in found}


def named(name: str) -> Path:
    """The directory of a suite by its name, made from the hub cache or from packages where it is not part of this one."""
    if name in EMBEDDED:
        return embedded(name)
    if name in INCREMENTAL:
        return incremental(name)
    if name in TRAINED:
        return trained_directory(name)
    recipe, folder = _recipe(name), cache_root() / "suites" / name
    write_recipe(recipe, folder)
    return folder


def suite_directory(where: str) -> Path:
    """The directory of a suite that was given by its directory or by its name."""
    return Path(where) if Path(where).exists() else named(where)


def build_named(
    name: str, out: Path, data: str | None = None, experts: Path | None = None, classifier: str = "head"
) -> SuiteJson:
    """Write a suite that is not trained here into a directory of one's own, with experts of one's own."""
    if name in INCREMENTAL and data:
        raise OptionError(f"--data: {name} has data of its own; cut another dataset with 'mergeway suites split'")
    if name not in INCREMENTAL and _recipe(name).protocol == "task" and (data or experts or classifier != "head"):
        raise OptionError(f"{name}: --data, --experts and --classifier are for cil and dil suites")
    with staged_directory(out) as stage:
        built = write_incremental(name, stage) if name in INCREMENTAL else write_recipe(_recipe(name), stage, data)
        suite = completed(built, experts, classifier)
        _replace(stage / "suite.json", suite)
    return suite


def _recipe(name: str) -> Recipe:
    known = recipes()
    if name not in known:
        everything = [*EMBEDDED, *INCREMENTAL, *TRAINED, *known]
        raise OptionError(f"{name}: no such directory, and no suite of that name; {suggest(name, everything)}")
    return known[name]


def write_recipe(recipe: Recipe, folder: Path, data: str | None = None) -> SuiteJson:
    """Write a suite of the hub into a directory: base, heads and experts stay in the cache, data in the hub's own."""
    clip = Clip(recipe.backbone)
    make_directory(folder / "data")
    own = recipe.protocol == "task"
    suite: SuiteJson = {
        "name": recipe.name,
        "kind": "clip-vision",
        "base": str(clip.base().resolve()),
        **clip.settings(),
        "tasks": _own_heads(recipe, clip, folder) if own else _shared_head(recipe, clip, folder, data),
    }
    if own:
        suite["training"] = CLIP_TRAINING
    else:
        suite["protocol"] = recipe.protocol
    if recipe.protocol == "cil" and recipe.datasets[0] in LONGER:
        suite["training"] = {"epochs": 30}
    _replace(folder / "suite.json", suite)
    return suite


def _own_heads(recipe: Recipe, clip: Clip, folder: Path) -> list[TaskJson]:
    """Tasks with experts and heads of their own, as FusionBench has them."""
    tasks: list[TaskJson] = []
    for name in recipe.datasets:
        known = known_datasets()[name]
        assert known.classes is not None
        _replace(folder / "data" / f"{name}.json", known.reading)
        expert = clip.expert(f"tanganke/{recipe.backbone.split('/')[-1]}_{name}")
        head = clip.head(name, known.classes, known.templates)
        tasks.append(
            {
                "name": name,
                "expert": str(expert.resolve()),
                "data": f"data/{name}.json",
                "head": str(head.resolve()),
                "classes": len(known.classes),
            }
        )
    return tasks


def _shared_head(recipe: Recipe, clip: Clip, folder: Path, data: str | None) -> list[TaskJson]:
    """Tasks cut from one dataset; their experts are left to be fine-tuned."""
    known = known_datasets()[recipe.datasets[0]]
    reading: Reading = {**known.reading, "dataset": data or known.reading["dataset"]}
    if reading["dataset"] is None:
        raise OptionError(
            f"{recipe.name}: no dataset of the hub is known to hold it; make it with 'mergeway suites build {recipe.name} --data ID' from one with the columns image, label and domain"
        )
    parts, classes = hub_parts(known, reading, recipe.tasks)
    readable = classes if known.classes else [c.replace("_", " ") for c in classes]
    head = str(clip.head(known.name, readable, known.templates).resolve())
    # The names matter where the labels are words; elsewhere they only tell what the numbers mean.
    shared: Reading = {**reading, "names": classes}
    tasks: list[TaskJson] = []
    for part in parts:
        own: Reading = (
            {**shared, "labels": part.labels}
            if known.domain is None
            else {**shared, "where": {known.domain: part.domain}}
        )
        _replace(folder / "data" / f"{part.name}.json", own)
        tasks.append(task_row(part, f"data/{part.name}.json", head))
    return tasks


def _replace(path: Path, value: Mapping[str, object]) -> None:
    """Write a file whole or not at all: two processes may make the same suite."""
    replace_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")
