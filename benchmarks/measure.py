"""What the benchmarks share: running commands side by side, watching their memory, and the ratio line.

Time is the shortest of several runs that take turns, because other work on the machine only ever adds to it. Memory is the
peak of the private anonymous pages of a process (`RssAnon` in /proc/<pid>/status), in a run of its own: pages of
mapped checkpoint files belong to the page cache and are given back whenever anyone needs them. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

HERE = Path(__file__).parent
MERGEWAY = [sys.executable, "-m", "mergeway"]

# Builds a command that writes to the given path, which is new and removed afterwards.
Command = Callable[[Path], list[str]]
# Is shown what a command is called, what it wrote and what it printed, before that is removed.
Look = Callable[[str, Path, str], None]


@dataclass(frozen=True)
class Ratio:
    """One measured figure against its target, if it has one."""

    what: str
    value: float
    target: float | None
    detail: str = ""
    at_least: bool = False

    @property
    def met(self) -> bool:
        if self.target is None:
            return True
        return self.value >= self.target if self.at_least else self.value <= self.target

    @property
    def verdict(self) -> str:
        """The target and whether it was met; nothing for a figure that is only reported."""
        if self.target is None:
            return ""
        return f"{'≥' if self.at_least else '≤'} {self.target:<6g} {'met' if self.met else 'MISSED'}"

    def __str__(self) -> str:
        verdict = f" (target {' '.join(self.verdict.split())})" if self.verdict else ""
        return f"{self.what}: {self.value:.3g}{verdict} {self.detail}".rstrip()


@dataclass(frozen=True)
class Skipped:
    """A figure that could not be measured, and why."""

    what: str
    why: str

    def __str__(self) -> str:
        return f"{self.what}: skipped, {self.why}"


Outcome = Ratio | Skipped


def options(doc: str | None, runs: int = 3) -> argparse.ArgumentParser:
    """The options that all benchmarks take."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="keep generated checkpoints here for the next time")
    parser.add_argument("--runs", type=int, default=runs, help=f"timed runs of each command (default {runs})")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads for every command")
    parser.add_argument("--mergekit", default=os.environ.get("MERGEKIT_YAML"), help="path of mergekit-yaml")
    parser.add_argument(
        "--fusionbench", default=os.environ.get("FUSIONBENCH_PYTHON"), help="a Python, or environment, with FusionBench"
    )
    return parser


@contextlib.contextmanager
def data_directory(chosen: Path | None) -> Iterator[Path]:
    """Where generated checkpoints go: the chosen directory, or one that vanishes."""
    if chosen is not None:
        chosen.mkdir(parents=True, exist_ok=True)
        yield chosen.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="mergeway-bench-") as folder:
        yield Path(folder)


@dataclass(frozen=True)
class Spent:
    """Seconds by the clock on the wall, and of all cores together."""

    wall: float
    cpu: float

    def __str__(self) -> str:
        return f"{self.wall:.2f} s ({self.cpu:.2f} s CPU)"


def seconds(
    commands: Mapping[str, Command], runs: int, threads: int, scratch: Path, look: Look | None = None
) -> dict[str, Spent]:
    """The shortest wall and the least CPU time of each command, in runs that take turns."""
    best = dict.fromkeys(commands, Spent(float("inf"), float("inf")))
    for turn in range(runs):
        for name, command in commands.items():
            with _output(scratch) as out:
                words = command(out)
                wall, cpu = time.perf_counter(), _children_cpu()
                printed = finish(name, start(words, threads))
                wall, cpu = time.perf_counter() - wall, _children_cpu() - cpu
                best[name] = Spent(min(best[name].wall, wall), min(best[name].cpu, cpu))
                if look and turn == runs - 1:
                    look(name, out, printed)
    return best


def timed(name: str, words: list[str], threads: int) -> Spent:
    """One run of a command whose result stays."""
    wall, cpu = time.perf_counter(), _children_cpu()
    finish(name, start(words, threads))
    return Spent(time.perf_counter() - wall, _children_cpu() - cpu)


def _children_cpu() -> float:
    """CPU seconds of all commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def anonymous_memory(name: str, command: Command, threads: int, scratch: Path, look: Look | None = None) -> int:
    """The peak of a command's private anonymous memory in bytes."""
    return watched(name, command, threads, scratch, look)[1]


def watched(name: str, command: Command, threads: int, scratch: Path, look: Look | None = None) -> tuple[Spent, int]:
    """One run of a command: its time and its peak of memory."""
    with _output(scratch) as out, tempfile.TemporaryFile("w+") as log:
        words = command(out)
        wall, cpu = time.perf_counter(), _children_cpu()
        process = start(words, threads, log)
        peak = 0
        while process.poll() is None:
            peak = max(peak, private_memory(process.pid))
            time.sleep(0.005)
        spent = Spent(time.perf_counter() - wall, _children_cpu() - cpu)
        log.seek(0)
        printed = finish(name, process, log.read())
        if look:
            look(name, out, printed)
    return spent, peak


def start(command: list[str], threads: int, log: IO[str] | int = subprocess.PIPE) -> subprocess.Popen[str]:
    """Start a command with that many threads for torch and everything below it."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True)


def finish(name: str, process: subprocess.Popen[str], logged: str = "") -> str:
    """What a command printed; a failed one ends the benchmark."""
    output = process.communicate()[0] or logged
    if process.returncode != 0:
        raise SystemExit(f"{name} failed with exit code {process.returncode}:\n{output[-2000:]}")
    return output


@contextlib.contextmanager
def _output(scratch: Path) -> Iterator[Path]:
    out = scratch / "output"
    try:
        yield out
    finally:
        shutil.rmtree(out, ignore_errors=True)


def private_memory(pid: int) -> int:
    """The private anonymous memory of a process in bytes; 0 once it has ended."""
    try:
        with open(f"/proc/{pid}/status") as file:
            for line in file:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        pass  # the process has just ended
    return 0


def report(outcomes: list[Outcome]) -> int:
    """Print the outcomes; the exit code says whether every measured target was met."""
    for outcome in outcomes:
        print(outcome, flush=True)
    return 1 if any(isinstance(o, Ratio) and not o.met for o in outcomes) else 0
