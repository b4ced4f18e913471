"""The learning rate of an incremental suite, chosen without a look at test data.

A fifth of every task's training examples is held out. Fine-tuning of task after task, plain interpolation and the merge by Eq. 4
of Holistic CMM are trained on the rest with each rate, one seed, and judged on what was held out. The rate with the highest
mean over the three is the suite's, so that it favours neither fine-tuning nor merging.

    python benchmarks/rates.py SUITE [--rates 3e-5,1e-4,3e-4,1e-3] [--epochs 1] [--classes own|all]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from ends import find_suite

METHODS = ("fine-tuning", "interpolation", "merge")


def main() -> None:
    """Print what each rate reaches on the held-out fifth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite")
    parser.add_argument("--rates", default="3e-5,1e-4,3e-4,1e-3")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--classes", choices=("own", "all"), default="own", help="as of mergeway finetune")
    given = parser.parse_args()
    torch.set_num_threads(1)

    print("| rate | joint | " + " | ".join(METHODS) + " | mean of the three |\n|---|" + "---|" * (len(METHODS) + 2))
    with tempfile.TemporaryDirectory() as folder:
        suite = find_suite(str(held_out(find_suite(given.suite), Path(folder) / "suite")))
        for rate in map(float, given.rates.split(",")):
            joint, *reached = judged(suite, lr=rate, epochs=given.epochs, classes=given.classes)
            cells = [f"{value:.1f}" for value in (joint, *reached, mean(reached))]
            print(f"| {rate:g} | {' | '.join(cells)} |", flush=True)


def held_out(suite: Any, folder: Path) -> Path:
    """The suite with every fifth training example, after a shuffle, in the place of its test data."""
    (folder / "data").mkdir(parents=True)
    described = json.loads((suite.path / "suite.json").read_text(encoding="utf-8"))
    for row in described["tasks"]:
        arrays = np.load(suite.path / row["data"])
        order = np.random.default_rng(0).permutation(len(arrays["y_train"]))
        fit, judge = order[len(order) // 5 :], order[: len(order) // 5]
        parts = {"train": fit, "test": judge}
        made = {f"{key}_{split}": arrays[f"{key}_train"][rows] for split, rows in parts.items() for key in "xy"}
        np.savez(folder / row["data"], **made)
        row["head"] = str((suite.path / row["head"]).resolve())
    described["base"] = str(suite.base.resolve())
    (folder / "suite.json").write_text(json.dumps(described), encoding="utf-8")
    return folder


def judged(suite: Any, **settings: Any) -> list[float]:
    """A_N of joint training and of the three methods with these settings."""
    from mergeway.bench.paper.methods import STAGES
    from mergeway.bench.paper.pipeline import Stream, settings_of

    training, alignment = settings_of(suite, 0)
    stream = Stream(suite, [t.name for t in suite.tasks], replace(training, **settings), alignment)
    ends = [stream.tune(stream.tasks).params]
    for method in METHODS:
        *_, last = stream.pipeline(STAGES[method])
        ends.append(last.deployed)
    return [mean(stream.accuracies(params)["head"]) for params in ends]


if __name__ == "__main__":
    main()
