"""The cost of a training step in the tangent space against a plain one, on the embedded suite; the aim is 3.5 times or less."""

from __future__ import annotations

import statistics
import time

import torch

from mergeway.bench.suite import load_suite
from mergeway.bench.suites import embedded
from mergeway.train import Training, finetune


def seconds_a_step(tangent: bool, steps: int = 6) -> float:
    """The time of a step, all of a training's start-up apart."""
    suite = load_suite(embedded("digits"))
    suite.samples("mnist", "train")
    times = []
    for count in (1, steps + 1):
        started = time.process_time()
        finetune(suite, "mnist", None, Training(steps=count, lr=1e-4, tangent=tangent))
        times.append(time.process_time() - started)
    return (times[1] - times[0]) / steps


if __name__ == "__main__":
    torch.set_num_threads(1)
    ratios = []
    for _ in range(3):
        plain, tangent = seconds_a_step(False), seconds_a_step(True)
        ratios.append(tangent / plain)
        print(f"plain {1000 * plain:.0f} ms, tangent {1000 * tangent:.0f} ms a step: {tangent / plain:.2f} times")
    print(f"median {statistics.median(ratios):.2f} times")
