"""ACC_w at the end of streams under random utilities: every rule in its utility-aware form, on the same draws.

One draw of utilities, normalised, and one order of the arrivals for each number; nothing is judged on the way, so rules whose
memory takes no data merge once a stream. Where `bench --utilities random` gives whole matrices, this gives their last rows.

    python benchmarks/utilities.py SUITE [--rules average,steer] [--draws 3] [--samples 1024] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch


def main() -> None:
    """Run what FILE does not hold yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite")
    parser.add_argument("--rules", default="all")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--out", type=Path, help="keep every number here, and go on from it")
    given = parser.parse_args()
    torch.set_num_threads(1)

    from mergeway.bench.protocol import parse_rule
    from mergeway.rules import RULES

    kept = json.loads(given.out.read_text()) if given.out and given.out.exists() else {}
    rules = list(RULES) if given.rules == "all" else given.rules.split(",")
    for rule in rules:
        name, options, _ = parse_rule(rule)
        for number in range(given.draws):
            if f"{rule} {number}" not in kept:
                kept[f"{rule} {number}"] = end_of(given.suite, name, options, number, given.samples)
                print(rule, number, kept[f"{rule} {number}"], file=sys.stderr, flush=True)
                if given.out:
                    given.out.write_text(json.dumps(kept, indent=1) + "\n")
    print("| rule | ACC_w | each draw |\n|---|---|---|")
    found = {rule: [kept[f"{rule} {n}"]["acc_w"] for n in range(given.draws)] for rule in rules}
    for rule, values in sorted(found.items(), key=lambda row: -np.mean(row[1])):
        print(f"| `{rule}` | {np.mean(values):.1f} ± {np.std(values):.1f} | {', '.join(f'{v:.1f}' for v in values)} |")


def end_of(where: str, rule: str, options: dict, number: int, samples: int) -> dict[str, float]:
    """ACC_w after the last arrival, and the seconds it took to merge."""
    import mergeway as mw
    from mergeway.bench.protocol import orders, utilities
    from mergeway.rules import make
    from mergeway.suites import named

    suite = mw.load_suite(named(where) if not Path(where).exists() else Path(where))
    order = orders([t.name for t in suite.tasks], number + 1)[number]
    weights = utilities(len(order), number, "random")
    chosen = make(rule, options)
    objective = suite.objective(list(order), size=samples, seed=number) if chosen.needs else None
    arrivals = [suite.task(task).expert for task in order]
    started = time.perf_counter()
    merged = mw.merge(suite.base, arrivals, chosen, list(weights), objective, threads=1)
    seconds = time.perf_counter() - started
    accuracies = suite.accuracies(merged, order, order)
    return {"acc_w": float(np.average(accuracies, weights=weights)), "seconds": round(seconds, 1)}


if __name__ == "__main__":
    main()
