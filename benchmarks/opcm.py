"""`opcm` on a ViT-B/32-shaped stream (base and five arrivals, 87 M parameters, float32) against OPCM with full SVDs.

Two peers: FusionBench itself, the authors' code with its own settings (peers/fusionbench_merge.py; --fusionbench or
FUSIONBENCH_PYTHON names a Python that has it, otherwise an environment is made in the user's cache directory), and the same
arithmetic as a bare torch script (peers/full_svd_opcm.py), which tells what is the method's cost and what the framework's.
All are whole processes, imports, reading and writing included, with the same number of threads. The results are compared as
well: a fast answer that is another answer would be no gain.

    python benchmarks/opcm.py [--data DIR] [--runs 2] [--threads N] [--fusionbench PATH] [--arrivals 5] [--layers 12]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from environments import fusionbench_python
from measure import HERE, Command, Outcome, Ratio, Skipped, data_directory, options, report, seconds
from outputs import FORGOTTEN, difference, read_output
from programs import fusionbench, mergeway
from streams import vit_stream

OURS, LEAN, PEER = "mergeway", "bare full-SVD script", "FusionBench"
# A full SVD of every matrix in every fold takes minutes; more runs would not change what is seen.
MOST_RUNS = 2


def main(arguments: list[str] | None = None) -> int:
    parser = options(__doc__, runs=2)
    parser.add_argument("--arrivals", type=int, default=5, help="arrivals in the stream (default 5)")
    parser.add_argument("--layers", type=int, default=12, help="layers of the tower, for a quick look (default 12)")
    return report(measure(parser.parse_args(arguments)))


def measure(chosen: argparse.Namespace) -> list[Outcome]:
    """How many times faster than each peer, and how far apart the results are."""
    with data_directory(chosen.data) as data:
        base, arrivals = vit_stream(data, getattr(chosen, "arrivals", 5), getattr(chosen, "layers", 12))
        commands: dict[str, Command] = {
            OURS: mergeway(base, arrivals, "opcm", chosen.threads),
            LEAN: lambda out: [sys.executable, str(HERE / "peers/full_svd_opcm.py"), str(out), *map(str, inputs)],
        }
        inputs = [base, *arrivals]
        python = fusionbench_python(chosen.fusionbench)
        if python:
            commands[PEER] = fusionbench(python, base, arrivals, "opcm")
        results, printed = {}, {}

        def look(name: str, out: Path, said: str) -> None:
            results[name], printed[name] = read_output(out), said

        scratch = data / "scratch"
        scratch.mkdir(exist_ok=True)
        spent = seconds(commands, min(chosen.runs, MOST_RUNS), chosen.threads, scratch, look)
        origin = read_output(base)
    outcomes: list[Outcome] = []
    if python:
        profile = json.loads(printed[PEER].strip().splitlines()[-1])
        detail = f"{spent[PEER]}, {profile['merging model']:.1f} s of it merging / {spent[OURS]}"
        error = difference(results[OURS], results[PEER], origin, FORGOTTEN)
        outcomes += [
            Ratio("opcm speed over FusionBench", spent[PEER].wall / spent[OURS].wall, 3.0, detail, at_least=True),
            Ratio(
                "opcm difference from FusionBench, relative",
                error.whole,
                1e-3,
                f"{error.direction:.1e} of it beside the length; without class_embedding, which it forgets",
            ),
        ]
    else:
        outcomes += [Skipped(f"opcm {what} FusionBench", "not installed") for what in ("speed over", "difference from")]
    detail = f"{spent[LEAN]} / {spent[OURS]}"
    error = difference(results[OURS], results[LEAN], origin).whole
    return [
        *outcomes,
        Ratio(f"opcm speed over a {LEAN}", spent[LEAN].wall / spent[OURS].wall, None, detail),
        Ratio(f"opcm difference from a {LEAN}, relative", error, 1e-3, "the peer works in float32"),
    ]


if __name__ == "__main__":
    sys.exit(main())
