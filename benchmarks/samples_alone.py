"""What calibration samples are worth by themselves: every weight trained on them, from the base or from the mean of the experts.

The control for rules that ask data. Adam on the whole objective at once, no rule, no singular directions; the accuracy on test
data after some steps at some rates. Who takes the best of the table has chosen by test data, which favours this control.

    python benchmarks/samples_alone.py SUITE [--starts mean] [--rates 1e-4,3e-4] [--steps 15,30,60]
                                       [--samples 1024] [--draws 3] [--out FILE]

A stream of eight arrivals sees more than n samples in all, for its first tasks had a larger share of them: 2.2 n.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import torch
from ends import Kept, Numbers, end_of, find_suite
from torch import Tensor

STARTS = {"base": "task-arithmetic:scaling=0", "mean": "average"}


def main() -> None:
    """Run what FILE does not hold yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite")
    parser.add_argument("--starts", default=",".join(STARTS), help="base, mean or both (default)")
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--rates", default="1e-4,3e-4")
    parser.add_argument("--steps", default="15,30,60")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--out", type=Path, help="keep every number here, and go on from it")
    given = parser.parse_args()
    torch.set_num_threads(1)

    suite, kept = find_suite(given.suite), Kept(given.out)
    steps = [int(count) for count in given.steps.split(",")]
    print(f"| from | rate | {' | '.join(f'{count} steps' for count in steps)} |\n|---|---|{'---|' * len(steps)}")
    for start in given.starts.split(","):
        for rate in given.rates.split(","):
            found = [
                kept.get(
                    f"{suite.name} {given.samples} {start} {rate} {given.steps} {draw}",
                    partial(trained, suite, start, float(rate), steps, given.samples, draw),
                )
                for draw in range(given.draws)
            ]
            columns = [[numbers[str(count)] for numbers in found] for count in steps]
            print(
                f"| {start} | {rate} | {' | '.join(f'{mean(c):.1f} ± {pstdev(c):.1f}' for c in columns)} |", flush=True
            )


def trained(suite: Any, start: str, rate: float, steps: list[int], samples: int, draw: int) -> Numbers:
    """Mean test accuracy over all tasks after so many steps."""
    names = [task.name for task in suite.tasks]
    objective = suite.objective(names, size=samples, seed=draw)
    weights: dict[str, Tensor] = {
        name: tensor.clone().requires_grad_()
        for name, tensor in end_of(suite, STARTS[start], names, None, samples, draw).items()
        if tensor.is_floating_point()
    }
    adam = torch.optim.Adam(weights.values(), lr=rate)
    found: Numbers = {}
    for step in range(1, max(steps) + 1):
        adam.zero_grad()
        objective.accumulate(weights)
        adam.step()
        if step in steps:
            here = {name: weight.detach() for name, weight in weights.items()}
            found[str(step)] = mean(suite.accuracies(here, names, names))
    return found


if __name__ == "__main__":
    main()
