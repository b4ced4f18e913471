"""Is a trunk of 2,000 folds as quick as one of 20? CPU, wall time and memory of `add`, `log`, `show` and `verify` along a long stream."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

import mergeway as mw
from mergeway.cli import main as run_command

SHORT = 20
TIMES = 41
COMMANDS = ("add", "log", "show", "verify")


class Streams:
    """Two trunks of the same arrivals, one of them much longer."""

    def __init__(self, folder: Path, long: int) -> None:
        self.base = {f"layers.{k}.weight": torch.randn(16, 16) for k in range(4)}
        self.arrival = folder / "arrival.safetensors"
        save_file(self.base, folder / "base.safetensors")
        self.paths = {step: folder / f"trunk-{step}" for step in (SHORT, long)}
        trunk = mw.Trunk.create(self.paths[long], folder / "base.safetensors", "average", threads=1)
        for step in range(1, long + 1):
            self.arrive()
            trunk.add(self.arrival, f"task {step}")
            if step == SHORT:
                shutil.copytree(self.paths[long], self.paths[SHORT])

    def arrive(self) -> None:
        save_file({n: t + 0.01 * torch.randn_like(t) for n, t in self.base.items()}, self.arrival)


def add_in_turns(streams: Streams) -> dict[int, list[tuple[float, float]]]:
    """In turns, so that whatever else the machine does falls on both alike."""
    spent: dict[int, list[tuple[float, float]]] = {step: [] for step in streams.paths}
    for turn in range(TIMES):
        streams.arrive()
        for step, path in streams.paths.items():
            cpu, wall = time.process_time(), time.perf_counter()
            mw.Trunk.open(path, threads=1).add(streams.arrival, f"turn {turn}")
            spent[step].append((time.process_time() - cpu, time.perf_counter() - wall))
    return spent


def in_a_process(command: str, trunk: Path, arrival: Path, turn: int) -> list[float]:
    """CPU and wall seconds of a command in a process of its own, and by how many kilobytes its memory grew at most."""
    words = words_of(command, trunk, arrival, turn)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        # The peak of memory counts from now.
        Path("/proc/self/clear_refs").write_text("5")
        held, cpu, wall = memory("VmRSS"), time.process_time(), time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            code = run_command(words)
        spent = [time.process_time() - cpu, time.perf_counter() - wall, memory("VmHWM") - held]
        os.write(writer, json.dumps(spent if code == 0 else None).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:
        found = json.loads(answer.read())
    os.waitpid(child, 0)
    assert found is not None, f"{command} failed"
    return found


def words_of(command: str, trunk: Path, arrival: Path, turn: int) -> list[str]:
    own = [str(arrival), "--task", f"process {turn}", "--again", "--threads", "1"] if command == "add" else []
    return [command, str(trunk), *own]


def memory(field: str) -> int:
    """What the system says of this process's memory, in kilobytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def main(long: int) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="mergeway-flat-") as folder:
        streams = Streams(Path(folder), long)
        print("one `add` in a process that has made others before, median:")
        spent = add_in_turns(streams)
        for step, times in spent.items():
            cpu, wall = (1e3 * statistics.median(t) for t in zip(*times, strict=True))
            print(f"  fold {step:<5} CPU {cpu:6.2f} ms, wall {wall:6.2f} ms, least CPU {1e3 * min(times)[0]:.2f} ms")
        short, long_ = (statistics.median(t[0] for t in times) for times in spent.values())
        print(f"  fold {long} against fold {SHORT}: {long_ / short:.2f} in CPU")
        print("\n| command | fold | CPU | wall | memory more than before |\n|---|---|---|---|---|")
        for command in COMMANDS:
            with contextlib.redirect_stdout(io.StringIO()):  # what is loaded when it is first asked for is there then
                run_command(words_of(command, streams.paths[SHORT], streams.arrival, -1))
            for step, path in streams.paths.items():
                runs = [in_a_process(command, path, streams.arrival, turn) for turn in range(5)]
                cpu, wall, peak = (statistics.median(values) for values in zip(*runs, strict=True))
                print(f"| `{command}` | {step:,} | {1e3 * cpu:.1f} ms | {1e3 * wall:.1f} ms | {peak / 1024:.1f} MB |")
        print("\n| file | " + " | ".join(f"fold {step:,}" for step in streams.paths) + " |\n|---|---|---|")
        for file in ("journal.jsonl", "head"):
            sizes = [f"{(path / file).stat().st_size / 1000:.1f} kB" for path in streams.paths.values()]
            print(f"| `{file}` | {' | '.join(sizes)} |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
