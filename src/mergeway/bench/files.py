"""The files of a run: a directory of plain text, resumed where it stopped.

run.json         suite, rules, protocol, version: what the run is
ends.json        what the base and the experts reach on each task
folds.jsonl      one JSON line for every finished fold
timings.jsonl    how long each of them took
matrices/*.csv   the accuracy matrix of every finished stream
underway/        the streams that are not finished: their folds, and the rule's state after the last of them

Only timings.jsonl differs between two finished runs of the same thing: the others are the same bytes however often a run was
killed and resumed, and however many processes worked on it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mergeway.bench.protocol import Cell
from mergeway.bench.stream import FoldResult, Underway, fold_of
from mergeway.checkpoint.source import read_json
from mergeway.core.files import contents, make_directory, replace_text, sweep, writing
from mergeway.errors import OptionError

FOLDS, TIMINGS = "folds.jsonl", "timings.jsonl"


class RunFiles:
    """The files of a run."""

    def __init__(self, out: Path, description: Mapping[str, object], resume: bool) -> None:
        self._out = out
        self._folds, self._timings = out / FOLDS, out / TIMINGS
        described = out / "run.json"
        if described.exists():
            if not resume:
                raise OptionError(
                    f"{out}: holds a run already; pass --resume to go on with it, or choose another directory"
                )
            if read_json(described, "the run's description") != description:
                raise OptionError(f"{out}: holds a run with another suite, rules or protocol; choose another directory")
            return
        sweep(described)
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise OptionError(f"{out}: exists and is not a run; choose another directory")
        make_directory(out)
        replace_text(described, json.dumps(description, indent=2) + "\n")

    def read(self) -> dict[str, list[FoldResult]]:
        """Finished streams; what was kept of the others is under way, with the state that their folds led to."""
        whole = finished_streams(self._out)
        self._write({key: (len(folds), folds) for key, folds in whole.items()})
        return whole

    def append(self, cell: Cell, fold: FoldResult) -> None:
        """Note a fold; the timing goes first, so that no fold is without one."""
        for path, line in (
            (self._timings, _timing(cell.key, fold)),
            (self._folds, _line(cell.key, len(cell.order), fold)),
        ):
            with writing(path), open(path, "a", encoding="utf-8") as file:
                file.write(line)

    def _write(self, streams: dict[str, tuple[int, list[FoldResult]]]) -> None:
        replace_text(self._timings, "".join(_timing(key, f) for key, (_, folds) in streams.items() for f in folds))
        replace_text(self._folds, "".join(_line(key, n, f) for key, (n, folds) in streams.items() for f in folds))

    def ends(self) -> dict[str, dict[str, float]] | None:
        path = self._out / "ends.json"
        return read_json(path, "the accuracies of base and experts") if path.exists() else None

    def write_ends(self, ends: dict[str, dict[str, float]]) -> None:
        replace_text(self._out / "ends.json", json.dumps(ends, indent=2) + "\n")

    def underway(self, cell: Cell) -> Underway:
        """Where an unfinished stream is kept."""
        return Underway(self._out / "underway" / _file_name(cell.key))

    def finish(self, finished: Sequence[tuple[Cell, list[FoldResult]]]) -> None:
        """All folds in the order of the plan, whichever was finished first, and the accuracy matrices."""
        self._write({cell.key: (len(cell.order), folds) for cell, folds in finished})
        self._write_matrices(finished)
        shutil.rmtree(self._out / "underway", ignore_errors=True)

    def _write_matrices(self, finished: Sequence[tuple[Cell, list[FoldResult]]]) -> None:
        folder = self._out / "matrices"
        make_directory(folder)
        for cell, folds in finished:
            rows = [",".join(["after", *cell.order])]
            for fold in folds:
                cells = [f"{a:.4f}" for a in fold.accuracies] + [""] * (len(cell.order) - fold.fold)
                rows.append(",".join([fold.task, *cells]))
            replace_text(folder / f"{_file_name(cell.key)}.csv", "\n".join(rows) + "\n")


def _file_name(key: str) -> str:
    return re.sub(r"[^A-Za-z0-9.=-]+", "_", key)


def finished_streams(out: Path) -> dict[str, list[FoldResult]]:
    """The streams in a run's directory that have all of their folds."""
    seconds = {(line["key"], line["fold"]): line["seconds"] for line in _lines(out / TIMINGS)}
    streams: dict[str, list[FoldResult]] = {}
    lengths: dict[str, int] = {}
    for line in _lines(out / FOLDS):
        key = line.pop("key")
        lengths[key] = line.pop("length")
        line["accuracies"] = tuple(line["accuracies"])
        streams.setdefault(key, []).append(fold_of({**line, "seconds": seconds.get((key, line["fold"]), 0.0)}))
    return {key: folds for key, folds in streams.items() if len(folds) == lengths[key]}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines; the last line of a killed run may be cut off."""
    if not path.exists():
        return
    for line in contents(path).splitlines():
        try:
            yield json.loads(line)
        except (ValueError, RecursionError):
            continue


def _line(key: str, length: int, fold: FoldResult) -> str:
    fields = {k: v for k, v in asdict(fold).items() if k != "seconds"}
    return json.dumps({"key": key, "length": length, **fields}, sort_keys=True) + "\n"


def _timing(key: str, fold: FoldResult) -> str:
    return json.dumps({"key": key, "fold": fold.fold, "seconds": fold.seconds}, sort_keys=True) + "\n"
