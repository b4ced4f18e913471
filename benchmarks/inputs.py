"""When you do not have the task's data: a suite whose experts are asked about other inputs than those of their own task.

    python benchmarks/inputs.py SUITE OUT pool|first|noise|other [--other SUITE] [--seed 0]
    mergeway bench OUT --rules average,steer --orders 3

Base, experts, heads and test data stay. The training inputs of every task become a draw from those of all tasks (`pool`), those
of the first task alone (`first`), random pixels (`noise`), or a draw from those of another suite (`other`), resized to fit. They
have no labels that mean anything, so only rules that ask the arrivals can be run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from ends import find_suite
from numpy.typing import NDArray
from PIL import Image

Pictures = NDArray[np.uint8]


def main() -> None:
    """Write OUT."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite")
    parser.add_argument("out", type=Path)
    parser.add_argument("kind", choices=("pool", "first", "noise", "other"))
    parser.add_argument("--other", help="the suite whose inputs are taken")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if (given.kind == "other") != (given.other is not None):
        parser.error("--other SUITE goes with the kind 'other', and with no other kind")

    suite, draw = find_suite(given.suite), np.random.default_rng(given.seed)
    (given.out / "data").mkdir(parents=True, exist_ok=True)
    described = json.loads((suite.path / "suite.json").read_text(encoding="utf-8"))
    rows = []
    for task, row in zip(suite.tasks, described["tasks"], strict=True):
        own = dict(np.load(task.data))
        pictures = own["x_train"]
        if given.kind == "noise":
            own["x_train"] = draw.integers(0, 256, pictures.shape, dtype=np.uint8)
        else:
            found = inputs_of(find_suite(given.other) if given.other else suite, given.kind)
            chosen = [found[i] for i in draw.choice(len(found), min(len(found), len(pictures)), replace=False)]
            own["x_train"] = np.stack([fitted(picture, pictures.shape[1:]) for picture in chosen])
        own["y_train"] = np.zeros(len(own["x_train"]), own["y_train"].dtype)
        np.savez_compressed(given.out / "data" / f"{task.name}.npz", **own)
        files = {"expert": str(task.expert.resolve()), "head": str(task.head.resolve())}
        rows.append({**row, **files, "data": f"data/{task.name}.npz"})
    described |= {"name": given.out.name, "base": str(suite.base.resolve()), "tasks": rows}
    (given.out / "suite.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")


def inputs_of(suite: Any, kind: str) -> list[Pictures]:
    """The training pictures of a suite, or of its first task."""
    tasks = suite.tasks[:1] if kind == "first" else suite.tasks
    return [picture for task in tasks for picture in np.load(task.data)["x_train"]]


def fitted(picture: Pictures, shape: tuple[int, ...]) -> Pictures:
    """The picture in another size, grey where the task's own are."""
    if picture.shape == shape:
        return picture
    image = Image.fromarray(picture.squeeze()).convert("L" if len(shape) == 2 or shape[2] == 1 else "RGB")
    return np.asarray(image.resize((shape[1], shape[0])), dtype=np.uint8).reshape(shape)


if __name__ == "__main__":
    main()
