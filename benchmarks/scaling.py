"""What a merge needs at any size: formulas, checked by measuring three small models, then filled in for 7 B, 70 B and 400 B.

Measured are the second fold of a trunk by each rule: bytes written, peak of private memory, CPU seconds. Bytes follow from the
number of parameters alone; private memory must not grow with depth; CPU seconds are fitted by a line.

    python benchmarks/scaling.py [--data DIR] [--threads N]
"""

from __future__ import annotations

import argparse
import shutil
import sys
from math import prod
from pathlib import Path

from measure import data_directory, options, watched
from streams import llama_config, llama_shapes, write_stream

RULES = ("average", "ties", "opcm", "iso")
WIDTH = (384, 1024, 4000)  # hidden, inner, vocabulary
DEPTHS = (2, 6, 12)
LARGE = {"7 B": 7e9, "70 B": 70e9, "400 B": 400e9}
DISK = 1e9  # bytes a second, of one good NVMe disk


def main(arguments: list[str] | None = None) -> int:
    chosen = options(__doc__, runs=1).parse_args(arguments)
    with data_directory(chosen.data) as data:
        rows = [(rule, *measure(rule, depth, data, chosen)) for rule in RULES for depth in DEPTHS]
    print("| rule | parameters | written | formula | private memory | CPU |\n|---|---|---|---|---|---|")
    for rule, size, written, memory, cpu in rows:
        print(
            f"| `{rule}` | {size / 1e6:.1f} M | {written / 1e6:.1f} MB | {snapshot(size, 4) / 1e6:.1f} MB | {memory / 1e6:.0f} MB | {cpu:.1f} s |"
        )
    print("\n| rule | " + " | ".join(f"{name}, CPU" for name in LARGE) + " |\n|---|" + "---|" * len(LARGE))
    for rule in RULES:
        points = [(size, cpu) for name, size, _, _, cpu in rows if name == rule]
        slope = (points[-1][1] - points[0][1]) / (points[-1][0] - points[0][0])
        print(f"| `{rule}` | " + " | ".join(f"{slope * size / 60:.0f} min" for size in LARGE.values()) + " |")
    return 0


def snapshot(parameters: float, width: int) -> float:
    """Bytes of one snapshot: the model in its dtype, and one float32 slot of memory."""
    return parameters * (width + 4)


def measure(rule: str, depth: int, data: Path, chosen: argparse.Namespace) -> tuple[int, int, int, float]:
    """Parameters, bytes of the new snapshot, private memory and CPU seconds of a second fold."""
    hidden, inner, vocabulary = WIDTH
    shapes = llama_shapes(hidden, inner, depth, vocabulary)
    base, arrivals = write_stream(data / f"scaling-{depth}", shapes, 2, llama_config(hidden, inner, depth, vocabulary))
    trunk = data / "scaling-trunk"
    shutil.rmtree(trunk, ignore_errors=True)
    program = [sys.executable, "-m", "mergeway"]
    threads = ["--threads", str(chosen.threads)]
    for words in (
        ["init", str(trunk), "--base", str(base), "--rule", rule],
        ["add", str(trunk), str(arrivals[0]), *threads],
    ):
        watched(rule, lambda _, words=words: [*program, *words], chosen.threads, data)
    last = ["add", str(trunk), str(arrivals[1]), *threads]
    spent, memory = watched(rule, lambda _: [*program, *last], chosen.threads, data)
    written = sum(p.stat().st_size for p in (trunk / "steps" / "000002").glob("*.safetensors"))
    return sum(prod(shape) for shape in shapes.values()), written, memory, spent.cpu


if __name__ == "__main__":
    raise SystemExit(main())
