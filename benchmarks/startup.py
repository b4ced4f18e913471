"""Seconds until `mergeway --help` has answered, the shortest of several runs; the peer is a bare `python -c pass`.

python benchmarks/startup.py [--runs 10]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import gettempdir

from measure import MERGEWAY, Command, Outcome, Ratio, options, report, seconds


def main(arguments: list[str] | None = None) -> int:
    chosen = options(__doc__, runs=10).parse_args(arguments)
    return report(measure(chosen))


def measure(chosen: argparse.Namespace) -> list[Outcome]:
    """The time to the answer."""
    commands: dict[str, Command] = {
        "mergeway --help": lambda _: [*MERGEWAY, "--help"],
        "python": lambda _: [sys.executable, "-c", "pass"],
    }
    spent = seconds(commands, chosen.runs, chosen.threads, Path(gettempdir()))
    return [
        Ratio(
            "mergeway --help, seconds", spent["mergeway --help"].wall, 0.5, f"bare python {spent['python'].wall:.2f} s"
        )
    ]


if __name__ == "__main__":
    sys.exit(main())
