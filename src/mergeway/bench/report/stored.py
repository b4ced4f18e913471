"""Reading a run's directory; unlike resuming a run, it changes nothing there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mergeway.bench.protocol import Cell, parse_rule, utilities
from mergeway.bench.run import Run
from mergeway.bench.stream import FoldResult
from mergeway.errors import OptionError

SWEEP = "sweep.json"


def read_run(path: Path) -> Run:
    """The finished streams of a run; one that is still going on, or was killed, counts as far as it came."""
    description = _read(path / "run.json")
    ends = _read(path / "ends.json") if (path / "ends.json").exists() else None
    seconds = {(row["key"], row["fold"]): row["seconds"] for row in _rows(path / "timings.jsonl")}
    folds: dict[str, list[FoldResult]] = {}
    lengths: dict[str, int] = {}
    for row in _rows(path / "folds.jsonl"):
        key = row.pop("key")
        lengths[key] = row.pop("length")
        row["accuracies"] = tuple(row["accuracies"])
        folds.setdefault(key, []).append(FoldResult(**row, seconds=seconds.get((key, row["fold"]), 0.0)))
    streams = {key: stream for key, stream in folds.items() if len(stream) == lengths[key]}
    if ends is None or not streams:
        raise OptionError(f"{path}: the run has no finished stream yet; go on with 'mergeway bench --resume'")
    cells = [_cell(key, stream, description) for key, stream in streams.items()]
    return Run(description["suite"], description, ends["base"], ends["experts"], streams, cells)


def _cell(key: str, stream: list[FoldResult], description: dict[str, Any]) -> Cell:
    label, length, number = key.rsplit(".", 2)
    name, options, _ = parse_rule(label)
    weights = utilities(int(length), int(number), description["utilities"])
    order = tuple(fold.task for fold in stream)
    return Cell(name, tuple(options.items()), label, order, weights, int(number), description["samples"])


def read_sweep(path: Path) -> dict[str, Any] | None:
    """The sweep that was recorded for a run, if there is one."""
    return _read(path / SWEEP) if (path / SWEEP).exists() else None


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; the last line of a killed run may be cut off."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise OptionError(f"{path}: cannot be read ({problem})") from None
