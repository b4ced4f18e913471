"""The main job on an embedded suite: every rule over a few orders, the report of it, and what to take away."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from mergeway.bench import Run, bench
from mergeway.bench.outcome import RunJson, RunRow
from mergeway.bench.report import record_sweep, run_data, write_page
from mergeway.bench.suite import load_suite
from mergeway.bench.suites import EMBEDDED, embedded
from mergeway.core.files import contents
from mergeway.core.pool import usable_cores
from mergeway.core.progress import Progress
from mergeway.errors import OptionError
from mergeway.rules import RULES

# What the other embedded suite is there for, in one line.
OTHERS = {
    "digits-light": "These experts are adapters that moved by 2 to 3 % of the base's norm. Run 'mergeway demo digits' for a stress test: the same tasks, moves of 12 %, and most rules below the average.",
    "digits": "These experts moved by 12 % of the base's norm, which is a stress test. Run 'mergeway demo' for adapters that moved by 2 to 3 %, as fine-tuned models do.",
}
# An eighth of the default calibration samples and a seventh of the test examples: the demo is watched, not waited for.
SAMPLES, TESTS = 128, 60
# As good as the 63 that 128 samples have by default, in as few steps as these, and a third of steer's time less.
COPIES = 15
JOBS = 2
# Either would take longer than all the others together.
_SHORTER = {"dop": "dop:steps=10", "steer": "steer:steps=8:most=64"}
_QUICK = ("average", "opcm", "iso", "ode", "steer")


def run_demo(name: str, out: Path, quick: bool, progress: Progress) -> tuple[Run, Path]:
    """Run the benchmark into `out` and write its report there; an earlier demo in that place is replaced."""
    suite, folder = load_suite(embedded(name), TESTS), out / "run"
    _clear(folder, suite.name)
    run = bench(
        suite.path,
        list(_QUICK) if quick else [_SHORTER.get(name, name) for name in RULES],
        lengths=[4] if quick else None,
        orders=1 if quick else 3,
        samples=SAMPLES,
        copies=COPIES,
        tests=TESTS,
        out=folder,
        jobs=min(JOBS, usable_cores()),
        progress=progress,
    )
    sweep = record_sweep(suite, run, folder, progress=progress)
    return run, write_page(run_data(run, sweep), out / "report.html")


def takeaways(result: RunJson) -> list[str]:
    """What a reader of the table should remember, in two or three sentences from its own figures."""
    rows = sorted(result["rows"], key=lambda row: -row["acc"])
    best = [row for row in rows if row["acc"] == rows[0]["acc"]]
    plain = next((row for row in rows if row["rule"] == "average"), rows[0])
    free = next((row for row in rows if not RULES[_name(row)].needs), None)
    names, comes = " and ".join(map(_name, best)), "comes" if len(best) == 1 else "come"
    sentences = [
        f"{names} {comes} nearest to the experts: {best[0]['gap']:.0f} % of the way from the base"
        + (f", where averaging the weights makes {plain['gap']:.0f} %." if plain not in best else ".")
    ]
    if free is not None and free not in best:
        sentences.append(f"Of the rules that need no data, {_name(free)} does best: {free['gap']:.0f} %.")
    below = sum(row["gap"] < 0 for row in rows)
    if below:
        sentences.append(
            f"{below} of {len(rows)} rules end below the base: with their defaults, you had better not fold at all."
        )
    return [*sentences, *([OTHERS[result["suite"]]] if result["suite"] in OTHERS else [])]


def _name(row: RunRow) -> str:
    """The rule without the options that the demo gives it."""
    return row["rule"].partition(":")[0]


def _clear(folder: Path, suite: str) -> None:
    if not folder.exists():
        return
    try:
        ours = json.loads(contents(folder / "run.json"))["suite"] in (suite, *EMBEDDED)
    except (OSError, ValueError, KeyError, TypeError):
        ours = False
    if not ours:
        raise OptionError(f"--out {folder.parent}: {folder} exists and is no earlier demo; choose another directory")
    shutil.rmtree(folder)
