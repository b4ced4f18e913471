"""The settings of a rule compared without a look at test data: ends of streams, judged on training samples that calibration left over.

Two arrivals share the samples when the first merge asks for them, so nothing beyond the first half of them is ever used to fit;
what a task has beyond is held out. The experts have seen it in training, so it tells settings apart but not how good they are.
The test accuracy of the same models stands beside it, to be read when the choice is made.

    python benchmarks/held_out.py SUITE RULE... [--numbers 3,4,5] [--samples 1024] [--out FILE]

A RULE is written as in `mergeway bench`, such as steer:carry=0.25; each number stands for an order of the arrivals and a draw.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from ends import Kept, Numbers, end_of, find_suite


def main() -> None:
    """Run what FILE does not hold yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite")
    parser.add_argument("rules", nargs="+", metavar="RULE")
    parser.add_argument("--numbers", default="3,4,5", help="orders and draws (default 3,4,5)")
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--out", type=Path, help="keep every number here, and go on from it")
    given = parser.parse_args()
    torch.set_num_threads(1)

    suite, kept = find_suite(given.suite), Kept(given.out)
    print("| rule | held out | each | test | each |\n|---|---|---|---|---|")
    for rule in given.rules:
        found = [
            kept.get(
                f"{suite.name} {given.samples} {rule} {number}",
                partial(judged, suite, rule, int(number), given.samples),
            )
            for number in given.numbers.split(",")
        ]
        cells = [_cells([numbers[split] for numbers in found]) for split in ("held out", "test")]
        print(f"| `{rule}` | {' | '.join(cells)} |", flush=True)


def judged(suite: Any, rule: str, number: int, samples: int) -> Numbers:
    """Mean accuracy over all tasks after the last arrival, on what calibration left over and on test data."""
    from mergeway.bench.protocol import orders
    from mergeway.calibration.samples import draw

    order = orders([task.name for task in suite.tasks], number + 1)[number]
    merged = end_of(suite, rule, order, None, samples, number)
    left = [draw(suite.samples(task, "train"), sys.maxsize, number).rows(slice(samples // 2, None)) for task in order]
    return {
        "held out": mean(_accuracy(suite, merged, rows) for rows in left),
        "test": mean(suite.accuracies(merged, order, order)),
    }


def _accuracy(suite: Any, params: Mapping[str, torch.Tensor], samples: Any) -> float:
    hits = 0
    with torch.no_grad():
        for start in range(0, len(samples), 64):
            rows = samples.rows(slice(start, start + 64))
            hits += int((suite.model(params, rows.inputs, rows.head).argmax(-1) == rows.labels).sum())
    return 100.0 * hits / len(samples)


def _cells(values: list[float]) -> str:
    return f"{mean(values):.1f} | {', '.join(f'{value:.1f}' for value in values)}"


if __name__ == "__main__":
    main()
