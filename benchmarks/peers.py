"""mergeway, mergekit and FusionBench on the same stream in one run: wall, CPU, private memory, and how far apart the results are.

The stream is shaped like the vision tower of CLIP ViT-B/32 (base and five arrivals, 87 M parameters, float32). Every program
runs as its users run it, whole processes with imports, reading and writing: mergeway merges the stream in one go, mergekit
(its mergekit-pytorch, see programs.py) knows no streams and merges all at once, FusionBench folds one arrival after another
and keeps a checkpoint of each. `ties` is mergeway's form=compound, which is FusionBench's rule; mergekit's is another (one
shot, density by tensor), so its difference is one of definition. A peer that cannot be installed is left out, with the reason.

    python benchmarks/peers.py [--data DIR] [--runs 2] [--threads N] [--mergekit PATH] [--fusionbench PATH]
                               [--rules average ...] [--arrivals 5] [--layers 12]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from environments import fusionbench_python, mergekit_yaml
from measure import Command, Outcome, Ratio, Skipped, Spent, data_directory, options, report, seconds, watched
from outputs import FORGOTTEN, difference, read_output
from programs import FUSIONBENCH, MERGEKIT, OURS, fusionbench, mergekit, mergeway
from streams import vit_stream

FORM = {"ties": ["form=compound"]}
# Full SVDs take minutes: the run that is watched for its memory is the only one.
SLOW = {"opcm"}


def main(arguments: list[str] | None = None) -> int:
    parser = options(__doc__, runs=2)
    parser.add_argument("--rules", nargs="+", choices=OURS, default=list(OURS), help="just these")
    parser.add_argument("--arrivals", type=int, default=5, help="arrivals in the stream (default 5)")
    parser.add_argument("--layers", type=int, default=12, help="layers of the tower, for a quick look (default 12)")
    return report(measure(parser.parse_args(arguments)))


def measure(chosen: argparse.Namespace) -> list[Outcome]:
    """Prints the table; the outcomes are mergeway's share of each peer's time and memory."""
    kit, bench = mergekit_yaml(chosen.mergekit), fusionbench_python(chosen.fusionbench)
    outcomes: list[Outcome] = [
        Skipped(f"{name} on the ViT-B/32 stream", "not installed")
        for name, found in (("mergekit", kit), ("FusionBench", bench))
        if not found
    ]
    print("| rule | program | wall | CPU | private memory | difference |\n|---|---|---|---|---|---|", flush=True)
    with data_directory(chosen.data) as data:
        base, arrivals = vit_stream(data, getattr(chosen, "arrivals", 5), getattr(chosen, "layers", 12))
        scratch = data / "scratch"
        scratch.mkdir(exist_ok=True)
        for rule in getattr(chosen, "rules", OURS):
            commands = {"mergeway": mergeway(base, arrivals, rule, chosen.threads, *FORM.get(rule, ()))}
            if kit and rule in MERGEKIT:
                commands["mergekit"] = mergekit(kit, data / "mergekit", base, arrivals, rule, files=True)
            if bench and rule in FUSIONBENCH:
                commands["FusionBench"] = fusionbench(bench, base, arrivals, rule)
            outcomes += compare(rule, commands, 0 if rule in SLOW else chosen.runs, chosen.threads, base, scratch)
    return outcomes


def compare(
    rule: str, commands: dict[str, Command], runs: int, threads: int, base: Path, scratch: Path
) -> list[Outcome]:
    """A row for every program, mergeway's first."""
    spent = seconds(commands, runs, threads, scratch)
    memory, gap, origin, ours = {}, {}, read_output(base), {}

    def look(name: str, out: Path, _: str) -> None:
        result = read_output(out)
        forgotten = FORGOTTEN if (rule, name) == ("opcm", "FusionBench") else ()
        gap[name] = difference(ours, result, origin, forgotten).whole if ours else None
        if not ours:
            ours.update(result)

    for name, command in commands.items():
        once, memory[name] = watched(name, command, threads, scratch, look)
        if not runs:
            spent[name] = once
        print(_row(rule, name, spent[name], memory[name], gap[name]), flush=True)
    mine = "mergeway"
    return [
        outcome
        for peer in commands
        if peer != mine
        for outcome in (
            Ratio(f"{rule} wall / {peer}, ViT-B/32", spent[mine].wall / spent[peer].wall, 1.0),
            Ratio(f"{rule} memory / {peer}, ViT-B/32", memory[mine] / memory[peer], 1.0),
        )
    ]


def _row(rule: str, name: str, spent: Spent, memory: int, gap: float | None) -> str:
    apart = "" if gap is None else f"{gap:.1e}"
    return f"| `{rule}` | {name} | {spent.wall:.1f} s | {spent.cpu:.1f} s | {memory / 1e6:.0f} MB | {apart} |"


if __name__ == "__main__":
    sys.exit(main())
