"""All benchmarks, one table. Takes about half an hour on two cores, most of it the peers.

python benchmarks/run.py [--data DIR] [--runs N] [--threads N] [--mergekit PATH] [--fusionbench PATH] [--only NAME ...]
"""

from __future__ import annotations

import sys

import constant
import elementwise
import ode
import opcm
import peers
import pipeline
import startup
import steer
from measure import Ratio, Skipped, options

BENCHMARKS = {
    "startup": startup,
    "elementwise": elementwise,
    "opcm": opcm,
    "peers": peers,
    "ode": ode,
    "steer": steer,
    "constant": constant,
    "pipeline": pipeline,
}


def main(arguments: list[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--only", nargs="+", choices=BENCHMARKS, default=list(BENCHMARKS), help="just these")
    chosen = parser.parse_args(arguments)
    outcomes: list[Ratio | Skipped] = []
    for name in chosen.only:
        print(f"measuring {name}", file=sys.stderr, flush=True)
        outcomes += BENCHMARKS[name].measure(chosen)
    width = max(len(outcome.what) for outcome in outcomes)
    for outcome in outcomes:
        if isinstance(outcome, Skipped):
            print(f"{outcome.what:{width}}  skipped: {outcome.why}")
            continue
        print(f"{outcome.what:{width}}  {outcome.value:8.3g}  {outcome.verdict:15}  {outcome.detail}".rstrip())
    return 1 if any(isinstance(o, Ratio) and not o.met for o in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
