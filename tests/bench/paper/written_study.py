"""A study whose runs are written by hand, so that the numbers of its tables can be worked out on paper."""

from __future__ import annotations

import json
from pathlib import Path

import mergeway as mw
from mergeway.bench.paper import Study
from mergeway.bench.protocol import orders

TASKS = ("ants", "bees", "cats")
BASE = {"ants": 20.0, "bees": 30.0, "cats": 40.0}
EXPERTS = {"ants": 90.0, "bees": 80.0, "cats": 70.0}


def empty(suite_path: Path, out: Path, rules: list[str], orders: int = 2) -> Study:
    """A study of streams of three tasks that knows what base and experts reach, and nothing else yet."""
    study = Study(mw.load_suite(suite_path), out, rules, rules, [3], orders=orders, samples=12)
    keep(study, "ends", {}, {"base": BASE, "experts": EXPERTS})
    return study


def keep(study: Study, name: str, protocol: dict, result: object) -> None:
    (study.out / "kept").mkdir(parents=True, exist_ok=True)
    text = json.dumps({"protocol": {"suite": "tiny", **protocol}, "result": result})
    (study.out / "kept" / f"{name}.json").write_text(text)


def write_run(
    study: Study,
    rule: str,
    matrices: list[list[list[float]]],
    *,
    utilities: str = "uniform",
    samples: int = 12,
    name: str | None = None,
    ahead: list[list[float]] | None = None,
    facts: list[list[dict]] | None = None,
    seconds: list[list[float]] | None = None,
    trajectories: list[list[dict]] | None = None,
) -> None:
    """A finished run of one rule: for every order the rows of its accuracy matrix, in the order of the stream."""
    folder = study.out / "runs" / (name or f"{rule}-3-{utilities}".replace(":", "_"))
    folder.mkdir(parents=True)
    described = {"suite": "tiny", "rules": [rule], "lengths": [3], "orders": len(matrices), "utilities": utilities}
    described |= {"samples": samples, "version": mw.__version__}
    (folder / "run.json").write_text(json.dumps(described))
    (folder / "ends.json").write_text(json.dumps({"base": BASE, "experts": EXPERTS}))
    lines, timings = [], []
    for number, (matrix, order) in enumerate(zip(matrices, orders(TASKS, len(matrices)), strict=True)):
        key = f"{rule}.3.{number}"
        for k, row in enumerate(matrix, 1):
            line = {"key": key, "length": 3, "fold": k, "task": order[k - 1], "accuracies": row}
            line["ahead"] = (ahead[number] if ahead else [0.0, 0.0])[k - 1] if k < 3 else None
            line["facts"] = facts[number][k - 1] if facts else {}
            line["details"] = {"trajectory": trajectories[number][k - 1]} if trajectories else {}
            lines.append(json.dumps(line))
            taken = seconds[number][k - 1] if seconds else 1.0
            timings.append(json.dumps({"key": key, "fold": k, "seconds": taken}))
    (folder / "folds.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "timings.jsonl").write_text("\n".join(timings) + "\n")
