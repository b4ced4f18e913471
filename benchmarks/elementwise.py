"""`average`, `task-arithmetic` and `ties` on Llama-like checkpoints of 438 MB (base and three arrivals, float32).

Wall time against a bare torch script that reads, averages and writes (peers/bare_average.py, its import included) and against
`mergekit-yaml`; private anonymous memory against mergekit. mergekit runs in an environment of its own: --mergekit or
MERGEKIT_YAML names its mergekit-yaml, otherwise one is made in the user's cache directory, and when that fails those
ratios are skipped.

    python benchmarks/elementwise.py [--data DIR] [--runs 3] [--threads N] [--mergekit PATH]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from environments import mergekit_yaml
from measure import (
    HERE,
    Command,
    Outcome,
    Ratio,
    Skipped,
    anonymous_memory,
    data_directory,
    options,
    report,
    seconds,
)
from programs import mergekit, mergeway
from streams import llama_config, llama_shapes, write_stream

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
        rules = ("average", "task-arithmetic", "ties")
        for rule in rules:
            commands[rule] = mergeway(base, arrivals, rule, chosen.threads)
        program = mergekit_yaml(chosen.mergekit)
        if program:
            for rule in rules:
                commands[f"mergekit {rule}"] = mergekit(program, data / "mergekit", base, arrivals, rule)
        scratch = data / "scratch"
        scratch.mkdir(exist_ok=True)
        spent = seconds(commands, chosen.runs, chosen.threads, scratch)
        outcomes: list[Outcome] = [
            Ratio(f"{rule} wall / {BARE}", spent[rule].wall / spent[BARE].wall, 1.5, f"{spent[rule]} / {spent[BARE]}")
            for rule in ("average", "task-arithmetic")
        ]
        for rule, target in (("average", 0.5), ("task-arithmetic", 0.5), ("ties", 0.15)):
            what, peer = f"{rule} wall / mergekit", f"mergekit {rule}"
            if not program:
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


if __name__ == "__main__":
    sys.exit(main())
