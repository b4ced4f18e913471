"""A run whose files are written by hand, and the command that reports it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import tiny
from written import FOLDS, ORDERS, SWEEP, TASKS, embedded, path_of


@dataclass
class WrittenRun:
    """A run on disk and the lines that were written into it."""

    path: Path
    rows: list[dict] = field(default_factory=list)


@pytest.fixture
def written(tmp_path) -> WrittenRun:
    made = WrittenRun(tmp_path / "run")
    made.path.mkdir()
    about = {
        "suite": "tiny",
        "rules": ["average", "ode"],
        "lengths": [3],
        "orders": 2,
        "utilities": "uniform",
        "samples": 64,
        "version": "0.1.0",
    }
    ends = {"base": {"ants": 50.0, "bees": 55.0, "cats": 60.0}, "experts": {"ants": 90.0, "bees": 91.0, "cats": 92.0}}
    timings = []
    for (rule, number), matrix in FOLDS.items():
        for k, accuracies in enumerate(matrix, 1):
            traced = rule == "ode" and k > 1
            key = f"{rule}.3.{number}"
            made.rows.append(
                {
                    "key": key,
                    "length": 3,
                    "fold": k,
                    "task": ORDERS[number][k - 1],
                    "accuracies": accuracies,
                    "facts": {"gradients": 2} if traced else {},
                    "details": {"trajectory": path_of(1 / k, 1.2, 1.0, [1.2, 1.1, 1.0])} if traced else {},
                }
            )
            timings.append({"key": key, "fold": k, "seconds": 0.25 * k})
    (made.path / "run.json").write_text(json.dumps(about))
    (made.path / "ends.json").write_text(json.dumps(ends))
    (made.path / "folds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made.rows))
    (made.path / "timings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in timings))
    return made


@pytest.fixture
def swept(written) -> WrittenRun:
    """The same run with a sweep."""
    (written.path / "sweep.json").write_text(json.dumps(SWEEP))
    return written


@pytest.fixture
def report(call, tmp_path):
    """Writes a report with the command and returns its path and the data inside."""

    def make(source, *words) -> tuple[Path, dict]:
        out = tmp_path / "report.html"
        assert call("report", source, "--out", out, "--json", *words).json()["report"] == str(out)
        return out, embedded(out)

    return make


@pytest.fixture(scope="session")
def suite(tmp_path_factory):
    """Four tasks of random pictures for a tiny CLIP vision tower; the experts are noisy copies of it."""
    return tiny.vision_suite(tmp_path_factory.mktemp("suite"), TASKS, test=40)
