"""Whether a fold costs the same however many came before: time and private memory of fold 50 against fold 2 of one trunk.

The trunk is copied before its second and before its fiftieth fold; each measured fold goes into a fresh copy, in a process of
its own, the two taking turns.

    python benchmarks/constant.py [--data DIR] [--runs 5] [--threads N]
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from measure import (
    HERE,
    Command,
    Outcome,
    Ratio,
    Spent,
    anonymous_memory,
    data_directory,
    finish,
    options,
    report,
    start,
)
from streams import llama_config, llama_shapes, write_stream

SIZE = (512, 1376, 6, 16000)
RULE = "average"
FOLDS = 50


def main(arguments: list[str] | None = None) -> int:
    chosen = options(__doc__, runs=5).parse_args(arguments)
    return report(measure(chosen))


def measure(chosen: argparse.Namespace) -> list[Outcome]:
    """Time and memory of the last fold against the second."""
    with data_directory(chosen.data) as data:
        base, arrivals = write_stream(data / "llama-109mb", llama_shapes(*SIZE), 3, llama_config(*SIZE))
        scratch = data / "constant"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        trunks = _grow(base, arrivals, scratch, chosen.threads)
        spent, memory = dict.fromkeys(trunks, Spent(float("inf"), float("inf"))), dict.fromkeys(trunks, 0)
        for _ in range(chosen.runs):
            for fold, trunk in trunks.items():
                command = _fold(trunk, arrivals[fold % len(arrivals)], chosen.threads)
                printed = finish(f"fold {fold}", start(command(scratch / "copy"), chosen.threads))
                shutil.rmtree(scratch / "copy")
                wall, cpu = map(float, printed.split())
                spent[fold] = Spent(min(spent[fold].wall, wall), min(spent[fold].cpu, cpu))
                peak = anonymous_memory(f"fold {fold}", command, chosen.threads, scratch)
                memory[fold] = min(memory[fold] or peak, peak)
        shutil.rmtree(scratch)
    last, second = spent[FOLDS], spent[2]
    sizes = f"{memory[FOLDS] / 1e6:.1f} MB / {memory[2] / 1e6:.1f} MB"
    return [
        Ratio(f"time of fold {FOLDS} / fold 2", last.wall / second.wall, 1.05, f"{last} / {second}"),
        Ratio(f"memory of fold {FOLDS} / fold 2", memory[FOLDS] / memory[2], 1.05, sizes),
    ]


def _grow(base: Path, arrivals: list[Path], scratch: Path, threads: int) -> dict[int, Path]:
    """The trunk as it stands before its second and before its last fold."""
    from mergeway import Trunk

    trunk = Trunk.create(scratch / "trunk", base, RULE, threads=threads)
    copies = {}
    for fold in range(1, FOLDS + 1):
        if fold in (2, FOLDS):
            copies[fold] = scratch / f"before-{fold}"
            shutil.copytree(scratch / "trunk", copies[fold])
        if fold < FOLDS:
            trunk.add(arrivals[fold % len(arrivals)], again=True)
    return copies


def _fold(trunk: Path, arrival: Path, threads: int) -> Command:
    """Folds into a copy of the trunk, so that the trunk stays as it is."""

    def command(copy: Path) -> list[str]:
        shutil.copytree(trunk, copy)
        return [sys.executable, str(HERE / "peers/fold_once.py"), str(copy), str(arrival), str(threads)]

    return command


if __name__ == "__main__":
    sys.exit(main())
