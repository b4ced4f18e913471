"""`average`, `task-arithmetic` and `ties` on Llama-like checkpoints of 438 MB (base and three arrivals, float32).

Wall time against a bare torch script that reads, averages and writes (peers/bare_average.py, its import included) and against
`mergekit-yaml`; private anonymous memory against mergekit. mergekit runs in an environment of its own: --mergekit or
MERGEKIT_YAML names its mergekit-yaml, otherwise one is made in the user's cache directory, and when that fails those
ratios are skipped.

    python benchmarks/elementwise.py [--data DIR] [--runs 3] [--threads N] [--mergekit PATH]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from measure import (
    HERE,
    MERGEWAY,
    Command,
    Outcome,
    Ratio,
    Skipped,
    anonymous_memory,
    data_directory,
    llama_config,
    llama_shapes,
    options,
    report,
    seconds,
    write_stream,
)

SIZE = (768, 2048, 12, 32000)
BARE = "bare torch"


def main(arguments: list[str] | None = None) -> int:
    chosen = options(__doc__).parse_args(arguments)
    return report(measure(chosen))


def measure(chosen: argparse.Namespace) -> list[Outcome]:
    """All ratios of this benchmark."""
    with data_directory(chosen.data) as data:
        base, arrivals = write_stream(data / "llama-438mb", llama_shapes(*SIZE), 3, llama_config(*SIZE))
        commands: dict[str, Command] = {BARE: _bare(arrivals)}
        ours = {
            "average": [],
            "task-arithmetic": ["--set", "scaling=0.3"],
            "ties": ["--set", "density=0.2", "--set", "scaling=0.3"],
        }
        for rule, settings in ours.items():
            commands[rule] = _mergeway(base, arrivals, rule, settings, chosen.threads)
        mergekit = chosen.mergekit or _make_mergekit()
        if mergekit:
            configs = data / "mergekit"
            configs.mkdir(exist_ok=True)
            for rule in ours:
                commands[f"mergekit {rule}"] = _mergekit(mergekit, configs, base, arrivals, rule)
        scratch = data / "scratch"
        scratch.mkdir(exist_ok=True)
        spent = seconds(commands, chosen.runs, chosen.threads, scratch)
        outcomes: list[Outcome] = [
            Ratio(f"{rule} wall / {BARE}", spent[rule].wall / spent[BARE].wall, 1.5, f"{spent[rule]} / {spent[BARE]}")
            for rule in ("average", "task-arithmetic")
        ]
        for rule, target in (("average", 0.5), ("task-arithmetic", 0.5), ("ties", 0.15)):
            what, peer = f"{rule} wall / mergekit", f"mergekit {rule}"
            if not mergekit:
                outcomes += [
                    Skipped(what, "no mergekit-yaml"),
                    Skipped(f"{rule} memory / mergekit", "no mergekit-yaml"),
                ]
                continue
            outcomes.append(Ratio(what, spent[rule].wall / spent[peer].wall, target, f"{spent[rule]} / {spent[peer]}"))
            used = [anonymous_memory(name, commands[name], chosen.threads, scratch) for name in (rule, peer)]
            outcomes.append(
                Ratio(
                    f"{rule} memory / mergekit",
                    used[0] / used[1],
                    0.5,
                    f"{used[0] / 1e6:.0f} MB / {used[1] / 1e6:.0f} MB",
                )
            )
    return outcomes


def _bare(arrivals: list[Path]) -> Command:
    return lambda out: [sys.executable, str(HERE / "peers/bare_average.py"), str(out), *map(str, arrivals)]


def _mergeway(base: Path, arrivals: list[Path], rule: str, settings: list[str], threads: int) -> Command:
    inputs = [str(path) for path in (base, *arrivals)]
    shared = ["--quiet", "--threads", str(threads)]
    return lambda out: [*MERGEWAY, "merge", *inputs, "--rule", rule, *settings, "--out", str(out), *shared]


def _mergekit(program: str, configs: Path, base: Path, arrivals: list[Path], rule: str) -> Command:
    """mergekit's form of the rule; JSON is YAML."""
    each: dict[str, dict[str, float]] = {
        "average": {"weight": 1.0},
        "task-arithmetic": {"weight": 0.3},
        "ties": {"weight": 0.3, "density": 0.2},
    }
    config: dict[str, object] = {
        "merge_method": {"average": "linear", "task-arithmetic": "task_arithmetic", "ties": "ties"}[rule],
        "models": [{"model": str(path), "parameters": each[rule]} for path in arrivals],
        "dtype": "float32",
    }
    if rule != "average":
        config["base_model"] = str(base)
    path = configs / f"{rule}.yml"
    path.write_text(json.dumps(config))
    return lambda out: [program, str(path), str(out), "--random-seed", "1", "--quiet"]


def _make_mergekit() -> str | None:
    """mergekit-yaml in an environment in the user's cache directory; None when it cannot be installed."""
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mergeway-benchmarks" / "mergekit"
    program = home / "bin" / "mergekit-yaml"
    install: Callable[..., object] = subprocess.check_call
    if not program.exists():
        print(f"installing mergekit into {home}", file=sys.stderr)
        try:
            install([sys.executable, "-m", "venv", str(home)])
            for package in ("torch==2.13.0", "mergekit"):
                install([str(home / "bin" / "python"), "-m", "pip", "install", "--quiet", package])
        except (subprocess.CalledProcessError, OSError) as problem:
            print(f"mergekit could not be installed: {problem}", file=sys.stderr)
            return None
    return str(program)


if __name__ == "__main__":
    sys.exit(main())
