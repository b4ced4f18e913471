"""A benchmark without its streams: whether everything is there, how much there is to judge, and about how long and how large that is."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from mergeway.bench.protocol import Cell
from mergeway.bench.suite import Suite
from mergeway.bench.suites.check import check_suite
from mergeway.calibration.judge import judge_samples
from mergeway.checkpoint import open_checkpoint
from mergeway.rules import RULES, make

PROBE = 32  # test inputs that are judged to see how long one takes
BACKWARD = 3  # a gradient takes about as long as so many passes forward


@dataclass(frozen=True)
class Forecast:
    """What a benchmark would do. `seconds` are those of all judging, on one process; `kept` is what a stream under way keeps on disk."""

    suite: str
    tasks: int
    parameters: int
    streams: int
    folds: int
    judged: int
    seconds_each: float
    seconds: float
    gradient_seconds: float
    needing_data: list[str]
    kept: int
    free: int

    def as_json(self) -> dict[str, object]:
        """As `bench --dry-run --json` prints it."""
        return asdict(self)


def rehearse(suite: Suite, cells: Sequence[Cell], out: Path | None) -> Forecast:
    """Read all of a suite, judge a few inputs by the base, and count the rest."""
    check_suite(suite.path)
    base = open_checkpoint(suite.base)
    for task in suite.tasks:
        _ = task.expert  # an error where there is none yet
    tests = {task.name: len(suite.samples(task.name, "test")) for task in suite.tasks}
    judged = 2 * sum(tests.values()) + sum(_judged([tests[name] for name in cell.order]) for cell in cells)
    each = _seconds_each(suite)
    size = sum(info.numel for info in base.infos.values() if info.merges)
    rules = {cell.label: make(cell.rule, dict(cell.options)) for cell in cells}
    return Forecast(
        suite=suite.name,
        tasks=len(suite.tasks),
        parameters=size,
        streams=len(cells),
        folds=sum(len(cell.order) for cell in cells),
        judged=judged,
        seconds_each=each,
        seconds=judged * each,
        gradient_seconds=BACKWARD * max((cell.samples for cell in cells), default=0) * each,
        needing_data=[label for label, rule in rules.items() if "calibration" in rule.needs],
        kept=4 * size * max((len(RULES[cell.rule].slots) for cell in cells if cell.rule in RULES), default=1),
        free=shutil.disk_usage(_existing(out or Path())).free,
    )


def _judged(tests: Sequence[int]) -> int:
    """The inputs judged along a stream: all tasks so far after every fold, and the one that comes next."""
    return sum(sum(tests[: k + 1]) + (tests[k + 1] if k + 1 < len(tests) else 0) for k in range(len(tests)))


def _seconds_each(suite: Suite) -> float:
    """How long the base takes for one test input; the first pass, which also sets things up, does not count."""
    samples = suite.samples(suite.tasks[0].name, "test").rows(slice(PROBE)).loaded()
    started = 0.0
    with torch.no_grad():
        for _ in range(2):
            started = time.perf_counter()
            judge_samples(suite.model, {}, samples)
    return (time.perf_counter() - started) / len(samples)


def _existing(path: Path) -> Path:
    """The nearest directory above that is there."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())
