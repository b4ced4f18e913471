"""What reading once leaves to be done: `add` by `average` on a bf16 checkpoint in shards, its files dropped from the page cache.

Against plain loops that read the same bytes and write the same bytes, flushed to the disk, from the same cold files. The two take
turns. The fold that is timed is the second, which reads base, arrival and state. Prints GB/s of both.

    python benchmarks/read_once.py [--data DIR] [--runs 2] [--threads N] [--gb 4]
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from measure import MERGEWAY, Outcome, Ratio, Spent, data_directory, finish, options, report, start, timed
from streams import large_stream

CHUNK = 1 << 22


def main(arguments: list[str] | None = None) -> int:
    parser = options(__doc__, runs=2)
    parser.add_argument("--gb", type=float, default=4.0, help="size of the checkpoint (default 4)")
    return report(measure(parser.parse_args(arguments)))


def measure(chosen: argparse.Namespace) -> list[Outcome]:
    """The ratio of the two, and how fast each moves bytes."""
    layers = max(1, round(getattr(chosen, "gb", 4.0) * 6))
    with data_directory(chosen.data) as data:
        base, arrivals = large_stream(data / f"llama-bf16-{layers}", (2560, 6912, layers, 32000))
        trunk, plain = data / "read-once-trunk", data / "read-once-plain"
        best: dict[str, Spent] = {}
        moved = 0
        for _ in range(chosen.runs):
            shutil.rmtree(trunk, ignore_errors=True)
            common = ["--quiet", "--threads", str(chosen.threads)]
            call = [*MERGEWAY, "init", str(trunk), "--base", str(base), "--rule", "average", "--keep", "1", "--quiet"]
            finish("init", start(call, chosen.threads))
            finish("add", start([*MERGEWAY, "add", str(trunk), str(arrivals[0]), *common], chosen.threads))
            state = _weights(trunk, "state.safetensors")
            read = [*_weights(base), *_weights(arrivals[1]), *state]
            drop(read)
            spent = {"add": timed("add", [*MERGEWAY, "add", str(trunk), str(arrivals[1]), *common], chosen.threads)}
            state = _weights(trunk, "state.safetensors")
            read, written = [*_weights(base), *_weights(arrivals[1]), *state], [*_weights(base), *state]
            moved = _size(read) + _size(written)
            drop(read)
            spent["plain"] = loops(read, _size(written), plain)
            for name, now in spent.items():
                before = best.get(name, now)
                best[name] = Spent(min(before.wall, now.wall), min(before.cpu, now.cpu))
        shutil.rmtree(trunk, ignore_errors=True)
    detail = "; ".join(f"{name} {spent}, {moved / 1e9 / spent.wall:.2f} GB/s" for name, spent in best.items())
    what = f"average: add wall / reading and writing its {moved / 1e9:.1f} GB"
    return [Ratio(what, best["add"].wall / best["plain"].wall, 1.2, detail)]


def loops(read: Iterable[Path], size: int, out: Path) -> Spent:
    """Read files from end to end, then write so many bytes and flush them."""
    wall, cpu = time.perf_counter(), time.process_time()
    buffer = memoryview(bytearray(CHUNK))
    for path in read:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    with open(out, "wb", buffering=0) as file:
        left = size
        while left > 0:
            left -= file.write(buffer[: min(left, CHUNK)])
        os.fsync(file.fileno())
    spent = Spent(time.perf_counter() - wall, time.process_time() - cpu)
    out.unlink()
    return spent


def drop(files: Iterable[Path]) -> None:
    """Have the system forget what it holds of these files; what is not on the disk yet goes there first."""
    for path in files:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _weights(folder: Path, name: str = "model*.safetensors") -> list[Path]:
    return sorted(path for path in folder.rglob(name) if path.is_file() and not path.is_symlink())


def _size(files: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in files)


if __name__ == "__main__":
    sys.exit(main())
