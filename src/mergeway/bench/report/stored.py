"""Reading a run's directory; unlike resuming a run, it changes nothing there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypedDict

from mergeway.bench.ends import Ends, end_losses
from mergeway.bench.files import finished_streams
from mergeway.bench.outcome import Description
from mergeway.bench.protocol import Cell, parse_rule, utilities
from mergeway.bench.run import Run
from mergeway.bench.stream import FoldResult
from mergeway.core.files import contents
from mergeway.errors import OptionError

SWEEP = "sweep.json"


class Sweep(TypedDict):
    """The last trajectory of a stream, and the accuracy of every task at several times of it."""

    suite: str
    rule: str
    order: list[str]
    weights: list[float]
    times: list[float]
    accuracies: dict[str, list[float]]
    trajectory: dict[str, object]


def read_run(path: Path) -> Run:
    """The finished streams of a run; one that is still going on, or was killed, counts as far as it came."""
    description: Description = _read(path / "run.json")
    ends: Ends | None = _read(path / "ends.json") if (path / "ends.json").exists() else None
    streams = finished_streams(path)
    if ends is None or not streams:
        raise OptionError(f"{path}: the run has no finished stream yet; go on with 'mergeway bench --resume'")
    cells = [_cell(key, stream, description) for key, stream in streams.items()]
    return Run(description["suite"], description, ends["base"], ends["experts"], streams, cells, end_losses(ends))


def _cell(key: str, stream: list[FoldResult], description: Description) -> Cell:
    label, length, number = key.rsplit(".", 2)
    name, options, _ = parse_rule(label)
    weights = utilities(int(length), int(number), description["utilities"])
    order = tuple(fold.task for fold in stream)
    return Cell(name, tuple(options.items()), label, order, weights, int(number), description["samples"])


def read_sweep(path: Path) -> Sweep | None:
    """The sweep that was recorded for a run, if there is one."""
    return _read(path / SWEEP) if (path / SWEEP).exists() else None


def _read(path: Path) -> Any:
    try:
        return json.loads(contents(path))
    except (OSError, ValueError, RecursionError) as problem:
        raise OptionError(f"{path}: cannot be read ({problem})") from None
