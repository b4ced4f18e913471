"""ACC_w at the end of streams under random utilities: every rule in its utility-aware form, on the same draws.

One draw of utilities, normalised, and one order of the arrivals for each number; nothing is judged on the way, so rules whose
memory takes no data merge once a stream. Where `bench --utilities random` gives whole matrices, this gives their last rows.

    python benchmarks/utilities.py SUITE [--rules average,steer] [--draws 3] [--samples 1024] [--autocast] [--out FILE]
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ends import Kept, Numbers, end_of, find_suite


def main() -> None:
    """Run what FILE does not hold yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite")
    parser.add_argument("--rules", default="all")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--autocast", action="store_true", help="matrix products in bfloat16")
    parser.add_argument("--out", type=Path, help="keep every number here, and go on from it")
    given = parser.parse_args()
    torch.set_num_threads(1)

    from mergeway.rules import RULES

    suite, kept = find_suite(given.suite, given.autocast), Kept(given.out)
    autocast = " autocast" if given.autocast else ""
    rules = list(RULES) if given.rules == "all" else given.rules.split(",")
    found = {
        rule: [
            kept.get(
                f"{suite.name} {given.samples} {rule} {number}{autocast}",
                partial(weighted, suite, rule, number, given.samples),
            )["acc_w"]
            for number in range(given.draws)
        ]
        for rule in rules
    }
    print("| rule | ACC_w | each draw |\n|---|---|---|")
    for rule, values in sorted(found.items(), key=lambda row: -np.mean(row[1])):
        print(f"| `{rule}` | {np.mean(values):.1f} ± {np.std(values):.1f} | {', '.join(f'{v:.1f}' for v in values)} |")


def weighted(suite: Any, rule: str, number: int, samples: int) -> Numbers:
    """ACC_w after the last arrival, and the seconds it took to merge."""
    from mergeway.bench.protocol import orders, utilities

    order = orders([task.name for task in suite.tasks], number + 1)[number]
    weights = utilities(len(order), number, "random")
    started = time.perf_counter()
    merged = end_of(suite, rule, order, weights, samples, number)
    seconds = time.perf_counter() - started
    accuracies = suite.accuracies(merged, order, order)
    return {"acc_w": float(np.average(accuracies, weights=weights)), "seconds": round(seconds, 1)}


if __name__ == "__main__":
    main()
