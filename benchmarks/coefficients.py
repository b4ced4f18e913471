"""A control for `steer`, in one shot: one coefficient for every task and tensor, taught by the same answers.

What AdaMerging and SAMerging move: θ = ψ_0 + Σ_i λ_{i,n} δ_{i,n} for every tensor n, λ from 1/k, by Adam on KL(expert ‖ merged) at the
temperature of `steer`, with every expert at hand at once and as many batches as a stream of `steer` takes in all its folds. The rates stand side by side;
taking the best one means choosing by test data, which favours this control.

    python benchmarks/coefficients.py SUITE [--rates 3e-3,1e-2,3e-2] [--samples 1024] [--number 0] [--autocast] [--out FILE]
"""

from __future__ import annotations

import argparse
from functools import partial
from math import cos, pi
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from ends import Kept, Numbers, find_suite

STEPS, BATCH = (
    1680,
    64,
)  # of `steer` at its defaults: 48 for each task seen, at most 384, over the folds of 2 to 8 tasks


def main() -> None:
    """Run what FILE does not hold yet, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite")
    parser.add_argument("--rates", default="3e-3,1e-2,3e-2")
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--number", type=int, default=0, help="the draw of the samples (default 0)")
    parser.add_argument("--autocast", action="store_true", help="matrix products in bfloat16")
    parser.add_argument("--out", type=Path, help="keep every number here, and go on from it")
    given = parser.parse_args()
    torch.set_num_threads(1)

    suite, kept = find_suite(given.suite, given.autocast), Kept(given.out)
    print("| rate | accuracy | loss of the last batches |\n|---|---|---|")
    for rate in given.rates.split(","):
        found = kept.get(
            f"{suite.name} {given.samples} {rate} {given.number}{' autocast' if given.autocast else ''}",
            partial(taught, suite, float(rate), given.samples, given.number),
        )
        print(f"| {rate} | {found['accuracy']:.1f} | {found['loss']:.3f} |", flush=True)


def taught(suite: Any, rate: float, samples: int, number: int) -> Numbers:
    """Mean test accuracy over all tasks, and the loss of the last tenth of the batches."""
    from mergeway.checkpoint import open_checkpoint
    from mergeway.rules import Steer

    order = [task.name for task in suite.tasks]
    base = open_checkpoint(suite.base)
    names = [name for name, info in base.infos.items() if info.merges]
    start = {n: base.read(n).float() for n in names}
    objective, deltas = suite.objective(order, size=samples, seed=number), []
    for k, task in enumerate(order, 1):
        checkpoint = open_checkpoint(suite.task(task).expert, base)
        expert = {n: checkpoint.read(n).float() for n in names}
        objective = objective.taught([1.0] * k, lambda expert=expert: expert, True)
        deltas.append({n: expert[n] - start[n] for n in names})
    objective = objective.seen(len(order)).softened(Steer().temperature)
    moved = [n for n in names if any(bool(d[n].any()) for d in deltas)]
    shares = {n: torch.full((len(order),), 1 / len(order)) for n in moved}
    adam, losses = torch.optim.Adam([*shares.values()], lr=rate), []

    def model() -> dict[str, torch.Tensor]:
        with torch.no_grad():
            return start | {n: start[n] + sum(c * d[n] for c, d in zip(shares[n], deltas, strict=True)) for n in moved}

    for step, rows in enumerate(objective.batches(STEPS, BATCH)):
        params = model()
        for n in moved:
            params[n].requires_grad_()
        losses.append(objective.accumulate_batch(params, rows))
        for n in moved:
            shares[n].grad = torch.stack([(params[n].grad * d[n]).sum() for d in deltas])
        adam.param_groups[0]["lr"] = rate * 0.5 * (1 + cos(pi * step / STEPS))
        adam.step()
    return {"accuracy": mean(suite.accuracies(model(), order, order)), "loss": mean(losses[-STEPS // 10 :])}


if __name__ == "__main__":
    main()
