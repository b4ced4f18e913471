"""Rules compared on a trunk of your own: its arrivals folded anew by each rule, and judged on test data that you give."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from mergeway.bench.metrics import acc, bwt, forgetting, gap_closed
from mergeway.bench.outcome import RunJson, RunRow
from mergeway.bench.protocol import parse_rule
from mergeway.calibration.given import Data
from mergeway.calibration.trial import tensors_of
from mergeway.checkpoint import open_checkpoint
from mergeway.core.pool import worker_pool
from mergeway.core.progress import SILENT, Progress
from mergeway.errors import OptionError
from mergeway.fold.prepare import prepare_arrival, prepare_base
from mergeway.rules import make
from mergeway.trunk import Trunk
from mergeway.trunk.replay import replay

Files = Mapping[str, str | Path]


def compare(
    trunk: Trunk, rules: Sequence[str], data: Mapping[str, Data], head: Files | None = None, progress: Progress = SILENT
) -> RunJson:
    """What each rule makes of the arrivals that a trunk holds, in their order and with their weights.

    A task is judged by the measure that says most of its data. Rules that need samples get those that the trunk remembers.
    """
    held = trunk.folded()
    if missing := [f.task for f in held if f.task not in data]:
        raise OptionError(f"--data: there is no test data of {', '.join(missing)}; give --data {missing[0]}=FILE")
    if strange := [name for name in data if name not in {f.task for f in held}]:
        raise OptionError(f"--data {strange[0]}=…: {trunk.path} holds no such task")
    weights = [f.weight for f in held]
    chosen = [(label, make(name, options)) for name, options, label in map(parse_rule, rules)]
    progress.begin(f"judging {len(rules)} rules", len(rules) + 1, "rules")
    base, experts = _ends(trunk, data, head)
    progress.advance(1)
    rows: list[RunRow] = []
    for label, rule in chosen:
        with tempfile.TemporaryDirectory(prefix="mergeway-bench-") as folder:
            began = time.perf_counter()
            replayed = replay(trunk, Path(folder) / "trunk", rule, head=head, keep=len(held) + 1)
            seconds = time.perf_counter() - began
            matrix = _matrix(replayed, data, head)
            gradients = sum(float(r.details.get("facts", {}).get("gradients", 0)) for r in replayed.log())
        reached = acc(matrix, weights)
        gap = gap_closed(reached, acc([base] * len(base), weights), acc([experts] * len(experts), weights))
        row: RunRow = {
            "rule": label,
            "tasks": len(held),
            "acc": reached,
            "bwt": bwt(matrix, weights),
            "gap": gap,
            "forgetting": forgetting(matrix, weights),
            "gradients": gradients,
            "seconds": seconds,
            **dict.fromkeys(("acc_std", "bwt_std", "gap_std", "forgetting_std"), 0.0),
            **dict.fromkeys(("fwt", "fwt_std", "loss", "loss_gap")),
        }  # type: ignore[typeddict-item]
        rows.append(row)
        progress.advance(1)
    return {
        "suite": trunk.name,
        "base": sum(base) / len(base),
        "experts": sum(experts) / len(experts),
        "base_loss": None,
        "experts_loss": None,
        "rows": rows,
    }


def _matrix(replayed: Trunk, data: Mapping[str, Data], head: Files | None) -> list[list[float]]:
    """Each task after each fold, in percent; a task that has not come yet counts nowhere."""
    names = [f.task for f in replayed.folded()]
    rows: list[list[float]] = []
    for k in range(1, len(names) + 1):
        found = replayed.evaluate({name: data[name] for name in names[:k]}, head=_of(head, names[:k]), step=k)
        rows.append([*(found[name].value for name in names[:k]), *[0.0] * (len(names) - k)])
    return rows


def _ends(trunk: Trunk, data: Mapping[str, Data], head: Files | None) -> tuple[list[float], list[float]]:
    """The base, and each arrival on its own task."""
    base, experts = trunk.deployed(0), []
    shared = tensors_of(base)
    held = trunk.folded()
    before = trunk.evaluate(data, head=head, params=shared)
    with worker_pool() as pool:
        prepared = prepare_base(base, pool, heads=trunk.heads)
        for folded in held:
            checkpoint = open_checkpoint(trunk.place_of(folded.step), base)
            arrival = prepare_arrival(prepared, checkpoint, folded.weight, folded.task, pool)
            own: dict[str, Tensor] = {**shared, **{name: arrival.read(name) for name in prepared.merged_infos}}
            task = {folded.task: data[folded.task]}
            experts.append(trunk.evaluate(task, head=_of(head, task), params=own)[folded.task].value)
    return [before[f.task].value for f in held], experts


def _of(head: Files | None, tasks: Sequence[str] | Mapping[str, object]) -> dict[str, str | Path]:
    return {task: file for task, file in (head or {}).items() if task in tasks}
