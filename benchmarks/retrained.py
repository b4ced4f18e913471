"""Streams that no rule was made on: a suite's base and data, with experts trained anew at another rate.

    python benchmarks/retrained.py SUITE OUT --lr 5e-4[,LR..] --steps 300 [--seed 0]
    mergeway bench OUT --rules all --orders 3

A higher rate gives experts that are farther apart, a lower one experts that hardly left the base. Several rates take turns over the
tasks: an expert that was trained hard overshoots between gentle ones, which is where the path of `ode` is damped.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import torch
from ends import find_suite


def main() -> None:
    """Train what OUT does not hold yet, and write its suite.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite")
    parser.add_argument("out", type=Path)
    parser.add_argument("--lr", type=_rates, required=True, help="one rate, or several with commas that take turns")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)

    from mergeway.train import Training, finetune

    suite = find_suite(given.suite)
    rows = []
    for task, lr in zip(suite.tasks, itertools.cycle(given.lr)):
        expert = given.out / "experts" / task.name
        if not expert.exists():
            training = Training(steps=given.steps, lr=lr, seed=given.seed, freeze="visual_projection")
            finetune(suite, task.name, expert, training)
            print(f"{task.name} trained", flush=True)
        files = {"expert": expert, "data": task.data, "head": task.head}
        labels = {"labels": list(task.labels)} if task.labels is not None else {}
        rows.append({"name": task.name, **{key: str(file.resolve()) for key, file in files.items()}, **labels})
    described = json.loads((suite.path / "suite.json").read_text(encoding="utf-8"))
    described |= {"name": given.out.name, "base": str(suite.base.resolve()), "tasks": rows}
    (given.out / "suite.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")


def _rates(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
