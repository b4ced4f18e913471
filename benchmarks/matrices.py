"""What `iso` and `opcm` cost for one matrix: processor time of one thread, and how far each is from the same in float64.

The matrices are random, as flat as sums of updates are that Adam made. Beside them stands a full SVD in float32, which is what a fold
by FusionBench's OPCM begins with. Up to a width of 1024 the results are compared with full SVDs in float64.

    python benchmarks/matrices.py [--shapes 768x768,3072x768] [--runs 3]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor

from mergeway.core.linalg import flat_spectrum
from mergeway.rules.opcm import project

ALPHA = 0.5


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="768x768,3072x768,4096x1024", help="which matrices")
    parser.add_argument("--runs", type=int, default=3, help="runs, of which the shortest counts (default 3)")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print("| matrix | `iso` | error | `opcm` | error | full SVD |\n|---|---|---|---|---|---|")
    with threadpool_limits(1, user_api="blas"):
        for text in chosen.shapes.split(","):
            print(row(*map(int, text.split("x")), chosen.runs), flush=True)
    return 0


def row(m: int, n: int, runs: int) -> str:
    """A line of the table."""
    generator = torch.Generator().manual_seed(0)
    total, delta = (1e-3 * torch.randn(m, n, generator=generator) for _ in range(2))
    times = [seconds(f, runs) for f in (lambda: flat_spectrum(total), lambda: project(delta, total, ALPHA))]
    errors = ["", ""]
    if min(m, n) <= 1024:
        times.append(seconds(lambda: torch.linalg.svd(total, full_matrices=True), runs))
        errors = [f"{error:.0e}" for error in errors_of(total, delta)]
    texts = [f"{1000 * t:.0f} ms" for t in times] + [""]
    return f"| {m}×{n} | {texts[0]} | {errors[0]} | {texts[1]} | {errors[1]} | {texts[2]} |"


def errors_of(total: Tensor, delta: Tensor) -> list[float]:
    """The relative errors of `iso` and `opcm` against decompositions of the whole in float64."""
    u, sigma, vt = torch.linalg.svd(total.double(), full_matrices=False)
    flat = sigma.mean() * u @ vt
    r = int((sigma.cumsum(0) <= ALPHA * sigma.sum()).sum())
    c = u.mT @ delta.double() @ vt.mT
    removed = torch.diag(c.diagonal())
    removed[:r, :r] = c[:r, :r]
    projected = delta.double() - u @ removed @ vt
    found = ((flat_spectrum(total), flat), (project(delta, total, ALPHA), projected))
    return [float((mine.double() - exact).norm() / exact.norm()) for mine, exact in found]


def seconds(work: Callable[[], object], runs: int) -> float:
    """The least processor time of this thread."""
    best = float("inf")
    for _ in range(runs):
        before = time.thread_time()
        work()
        best = min(best, time.thread_time() - before)
    return best


if __name__ == "__main__":
    sys.exit(main())
