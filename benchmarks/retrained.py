"""Streams that no rule was made on: a suite's base and data, with experts trained anew at another rate.

    python benchmarks/retrained.py SUITE OUT --lr 5e-4 --steps 300 [--seed 0]
    mergeway bench OUT --rules all --orders 3

A higher rate gives experts that are farther apart, a lower one experts that hardly left the base.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from ends import find_suite


def main() -> None:
    """Train what OUT does not hold yet, and write its suite.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite")
    parser.add_argument("out", type=Path)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)

    from mergeway.train import Training, finetune

    suite = find_suite(given.suite)
    training = Training(steps=given.steps, lr=given.lr, seed=given.seed, freeze="visual_projection")
    rows = []
    for task in suite.tasks:
        expert = given.out / "experts" / task.name
        if not expert.exists():
            finetune(suite, task.name, expert, training)
            print(f"{task.name} trained", flush=True)
        files = {"expert": expert, "data": task.data, "head": task.head}
        labels = {"labels": list(task.labels)} if task.labels is not None else {}
        rows.append({"name": task.name, **{key: str(file.resolve()) for key, file in files.items()}, **labels})
    described = json.loads((suite.path / "suite.json").read_text(encoding="utf-8"))
    described |= {"name": given.out.name, "base": str(suite.base.resolve()), "tasks": rows}
    (given.out / "suite.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
