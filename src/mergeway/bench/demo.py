"""The main job on the embedded suite: every rule over a few orders, and the report of it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from mergeway.bench import Run, bench
from mergeway.bench.report import record_sweep, run_data, write_page
from mergeway.bench.suite import load_suite
from mergeway.bench.suites import embedded
from mergeway.core.progress import Progress
from mergeway.errors import OptionError
from mergeway.rules import RULES

SUITE = "digits"
# An eighth of the default calibration samples and a seventh of the test examples: the demo is watched, not waited for.
SAMPLES, TESTS = 128, 60
JOBS = 2
# Either would take longer than all the others together.
_SHORTER = {"dop": "dop:steps=10", "steer": "steer:steps=8:most=64"}
_QUICK = ("average", "opcm", "iso", "ode", "steer")


def run_demo(out: Path, quick: bool, progress: Progress) -> tuple[Run, Path]:
    """Run the benchmark into `out` and write its report there; an earlier demo in that place is replaced."""
    suite, folder = load_suite(embedded(SUITE), TESTS), out / "run"
    _clear(folder, suite.name)
    run = bench(
        suite.path,
        list(_QUICK) if quick else [_SHORTER.get(name, name) for name in RULES],
        lengths=[4] if quick else None,
        orders=1 if quick else 3,
        samples=SAMPLES,
        tests=TESTS,
        out=folder,
        jobs=min(JOBS, len(os.sched_getaffinity(0))),
        progress=progress,
    )
    sweep = record_sweep(suite, run, folder, progress=progress)
    return run, write_page(run_data(run, sweep), out / "report.html")


def _clear(folder: Path, suite: str) -> None:
    if not folder.exists():
        return
    try:
        ours = json.loads((folder / "run.json").read_text(encoding="utf-8"))["suite"] == suite
    except (OSError, ValueError, KeyError, TypeError):
        ours = False
    if not ours:
        raise OptionError(f"--out {folder.parent}: {folder} exists and is no earlier demo; choose another directory")
    shutil.rmtree(folder)
