"""The settings of a rule compared without a look at test data: ends of streams, judged on training samples that calibration left over.

Two arrivals share the samples when the first merge asks for them, so nothing beyond the first half of them is ever used to fit;
what a task has beyond is held out, up to 512 samples of it. The experts have seen it in training, so it tells settings apart but
not how good they are. It is judged by KL(expert ‖ merged) and by accuracy; `--test` adds the test accuracy, to be read when the
choice is made.

    python benchmarks/held_out.py SUITE RULE... [--numbers 3,4,5] [--samples 1024] [--autocast] [--test] [--out FILE]

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
from torch import Tensor

Params = Mapping[str, Tensor]
MOST = 512  # samples of a task that are held out


def main() -> None:
    """Run what FILE does not hold yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite")
    parser.add_argument("rules", nargs="+", metavar="RULE")
    parser.add_argument("--numbers", default="3,4,5", help="orders and draws (default 3,4,5)")
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--autocast", action="store_true", help="matrix products in bfloat16")
    parser.add_argument("--test", action="store_true", help="judge on test data too")
    parser.add_argument("--out", type=Path, help="keep every number here, and go on from it")
    given = parser.parse_args()
    torch.set_num_threads(1)

    suite, kept = find_suite(given.suite, given.autocast), Kept(given.out)
    columns = ["KL", "held out", *(["test"] if given.test else [])]
    print(f"| rule | {' | each | '.join(columns)} | each |\n|---|{'---|---|' * len(columns)}")
    for rule in given.rules:
        found = [
            kept.get(
                f"{suite.name} {given.samples} {rule} {number}{' test' if given.test else ''}{' autocast' if given.autocast else ''}",
                partial(judged, suite, rule, int(number), given.samples, given.test),
            )
            for number in given.numbers.split(",")
        ]
        cells = [_cells([numbers[column] for numbers in found], 4 if column == "KL" else 1) for column in columns]
        print(f"| `{rule}` | {' | '.join(cells)} |", flush=True)


def judged(suite: Any, rule: str, number: int, samples: int, test: bool) -> Numbers:
    """Means over all tasks after the last arrival, on what calibration left over and perhaps on test data."""
    from mergeway.bench.protocol import orders
    from mergeway.calibration.samples import draw
    from mergeway.checkpoint import open_checkpoint

    order = orders([task.name for task in suite.tasks], number + 1)[number]
    merged = end_of(suite, rule, order, None, samples, number)
    base = open_checkpoint(suite.base)
    found: dict[str, list[float]] = {"KL": [], "held out": []}
    for task in order:
        left = draw(suite.samples(task, "train"), sys.maxsize, number).rows(slice(samples // 2, samples // 2 + MOST))
        expert = open_checkpoint(suite.task(task).expert, base)
        divergence, accuracy = _compared(suite, {n: expert.read(n) for n in expert.infos}, merged, left)
        found["KL"].append(divergence)
        found["held out"].append(accuracy)
    means = {name: mean(values) for name, values in found.items()}
    return means | ({"test": mean(suite.accuracies(merged, order, order))} if test else {})


def _compared(suite: Any, expert: Params, merged: Params, samples: Any) -> tuple[float, float]:
    """KL(expert ‖ merged), a sample's mean, and the accuracy of the merged model."""
    divergence, hits = 0.0, 0
    with torch.no_grad():
        for start in range(0, len(samples), 64):
            rows = samples.rows(slice(start, start + 64))
            wanted, found = (suite.model(params, rows.inputs, rows.head).log_softmax(-1) for params in (expert, merged))
            divergence += float((wanted.exp() * (wanted - found)).sum())
            hits += int((found.argmax(-1) == rows.labels).sum())
    return divergence / len(samples), 100.0 * hits / len(samples)


def _cells(values: list[float], digits: int) -> str:
    return f"{mean(values):.{digits}f} | {', '.join(f'{value:.{digits}f}' for value in values)}"


if __name__ == "__main__":
    main()
