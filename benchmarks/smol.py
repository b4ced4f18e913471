"""mergeway beside mergekit on SmolLM2 and its four adapters: wall, CPU, private memory, and how often each result answers right.

The suite `smol` must have been built (`mergeway suites build smol`). mergekit takes whole models, so every adapter is folded into the
base first; both programs get the same five directories, and both results are judged by `mergeway evaluate`. Every command runs once,
watched for its memory, so `--runs` changes nothing here.

    python benchmarks/smol.py [--suite DIR] [--data DIR] [--threads N] [--mergekit PATH] [--rules average ...]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from environments import mergekit_yaml
from measure import MERGEWAY, Outcome, Ratio, Skipped, data_directory, options, report, timed, watched
from programs import MERGEKIT, mergekit, mergeway

from mergeway.bench.suite import load_suite
from mergeway.bench.suites.named import suite_directory


def main(arguments: list[str] | None = None) -> int:
    parser = options(__doc__, runs=1)
    parser.add_argument("--suite", default="smol", help="the suite's directory or name (default smol)")
    parser.add_argument("--rules", nargs="+", choices=MERGEKIT, default=list(MERGEKIT), help="just these")
    return report(measure(parser.parse_args(arguments)))


def measure(chosen: argparse.Namespace) -> list[Outcome]:
    """Prints the table; the outcomes are mergeway's share of mergekit's time and memory."""
    kit = mergekit_yaml(chosen.mergekit)
    if not kit:
        return [Skipped("mergekit on SmolLM2", "not installed")]
    outcomes: list[Outcome] = []
    print("| rule | program | wall | CPU | private memory | right answers |\n|---|---|---|---|---|---|", flush=True)
    with data_directory(chosen.data) as data:
        base, experts = whole_experts(chosen.suite, data, chosen.threads)
        for rule in chosen.rules:
            commands = {
                "mergeway": mergeway(base, experts, rule, chosen.threads),
                "mergekit": mergekit(kit, data / "mergekit", base, experts, rule),
            }
            spent, memory = {}, {}
            for name, command in commands.items():
                right = dict[str, float]()

                def look(_: str, out: Path, __: str, right: dict[str, float] = right) -> None:
                    right["acc"] = judged(out, base, chosen.suite)

                spent[name], memory[name] = watched(name, command, chosen.threads, data, look)
                row = f"{spent[name].wall:.1f} s | {spent[name].cpu:.1f} s | {memory[name] / 1e6:.0f} MB | {right['acc']:.1f}"
                print(f"| `{rule}` | {name} | {row} |", flush=True)
            wall, private = (
                kind["mergeway"] / kind["mergekit"] for kind in ({n: s.wall for n, s in spent.items()}, memory)
            )
            outcomes += [
                Ratio(f"{rule} wall / mergekit, SmolLM2", wall, 1.0),
                Ratio(f"{rule} memory / mergekit, SmolLM2", private, 1.0),
            ]
    return outcomes


def whole_experts(suite: str, data: Path, threads: int) -> tuple[Path, list[Path]]:
    """The base, and every expert of the suite as a whole model."""
    loaded, folders = load_suite(suite_directory(suite)), list[Path]()
    for task in loaded.tasks:
        folders.append(data / task.name)
        if not folders[-1].exists():
            words = [
                *MERGEWAY,
                "merge",
                str(loaded.base),
                str(task.expert),
                "--rule",
                "average",
                "--out",
                str(folders[-1]),
            ]
            timed(task.name, [*words, "--quiet"], threads)
    return Path(loaded.base), folders


def judged(model: Path, base: Path, suite: str) -> float:
    """Right answers in percent, the mean over the tasks."""
    words = [*MERGEWAY, "evaluate", str(model), "--suite", suite, "--base", str(base), "--autocast", "--json"]
    return json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)["acc"]


if __name__ == "__main__":
    sys.exit(main())
