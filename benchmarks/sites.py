"""One task trained at several sites: a suite whose tasks are equal shares of one task's training data, all with its test data.

    python benchmarks/sites.py SUITE TASK OUT [--sites 5]
    python benchmarks/retrained.py OUT OUT-hard --lr 3e-3 --steps 150
    mergeway bench OUT-hard --rules average,ode --orders 3

Experts of different tasks pull a merge down into the valley between them, so the path of `ode` is never damped before it stops.
Experts of one task that were trained hard have a hill between them, and there it is.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from ends import find_suite


def main() -> None:
    """Write the data of every site, and a suite.json without experts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite")
    parser.add_argument("task")
    parser.add_argument("out", type=Path)
    parser.add_argument("--sites", type=int, default=5)
    given = parser.parse_args()
    suite = find_suite(given.suite)
    task = suite.task(given.task)
    (given.out / "data").mkdir(parents=True)
    arrays = dict(np.load(task.data))
    shares = np.array_split(np.random.default_rng(0).permutation(len(arrays["y_train"])), given.sites)
    rows = []
    for number, share in enumerate(shares, 1):
        data = given.out / "data" / f"site{number}.npz"
        own = {key: array[np.sort(share)] if key.endswith("_train") else array for key, array in arrays.items()}
        np.savez_compressed(data, **own)
        rows.append({"name": f"site{number}", "data": str(data.resolve()), "head": str(task.head.resolve())})
    described = json.loads((suite.path / "suite.json").read_text(encoding="utf-8"))
    described |= {"name": given.out.name, "protocol": "task", "base": str(suite.base.resolve()), "tasks": rows}
    (given.out / "suite.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
