"""`steer` against `ode` as released and with the released mechanisms solved exactly (h = 0.01), on the same stream and samples.

Passes over the calibration samples, with a gradient and without (probes), time, and the accuracy after the last arrival; for
the whole stream and for its last merge. The suite is mini8 when it lies beside (../shared/suites/mini8, or MERGEWAY_MINI8),
else the embedded one. Passes and accuracies do not change from run to run, so every stream is folded once.

    python benchmarks/steer.py [--suite SUITE] [--samples 512] [--orders 1]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import mean, stdev

from measure import HERE, Outcome, Ratio, Spent, finish, options, report, start
from ode import MINI8

OURS = "steer"
RULES = {OURS: ("steer", ""), "ode as released": ("ode", "preset=released"), "ode, exact": ("ode", "preset=exact")}
Stream = dict[str, list]


def main(arguments: list[str] | None = None) -> int:
    parser = options(__doc__, runs=1)
    parser.add_argument("--suite", type=Path, help="by default mini8, or the embedded one")
    parser.add_argument("--samples", type=int, default=512, help="calibration samples (default 512)")
    parser.add_argument("--orders", type=int, default=1, help="orders of the arrivals (default 1)")
    return report(measure(parser.parse_args(arguments)))


def measure(chosen: argparse.Namespace) -> list[Outcome]:
    """What each spends, and what it reaches."""
    import mergeway as mw
    from mergeway.bench.protocol import orders
    from mergeway.bench.suites.embedded import embedded

    found = MINI8 if (MINI8 / "suite.json").exists() else embedded("digits")
    suite = mw.load_suite(getattr(chosen, "suite", None) or found)
    samples, tasks = getattr(chosen, "samples", 512), [task.name for task in suite.tasks]
    streams: dict[str, list[Stream]] = {rule: [] for rule in RULES}
    for number, order in enumerate(orders(tasks, getattr(chosen, "orders", 1))):
        for label, (rule, settings) in RULES.items():
            words = [str(suite.path), str(samples), str(number), rule, settings, *order]
            printed = finish(rule, start([sys.executable, str(HERE / "peers/calibrated_stream.py"), *words], 1))
            streams[label].append(json.loads(printed.strip().splitlines()[-1]))
    where = f"{suite.name}, {samples} samples"
    return [outcome for peer in RULES if peer != OURS for outcome in _against(peer, streams, where)]


def _against(peer: str, streams: dict[str, list[Stream]], where: str) -> list[Outcome]:
    outcomes: list[Outcome] = []
    pair = (OURS, peer)
    for what, part in (("stream", slice(None)), ("last merge", slice(-1, None))):
        ours, theirs = (_passes(streams[label], part) for label in pair)
        outcomes.append(Ratio(f"steer passes / {peer}, {what}", sum(ours) / sum(theirs), 1 / 3, _spell(ours, theirs)))
        spent, other = (_spent(streams[label], part) for label in pair)
        outcomes.append(Ratio(f"steer time / {peer}, {what}", spent.wall / other.wall, None, f"{spent} / {other}"))
    ours, theirs = ([mean(stream["accuracies"]) for stream in streams[label]] for label in pair)
    detail = f"{_accuracy(ours)} / {_accuracy(theirs)}, {where}"
    outcomes.append(Ratio(f"steer accuracy / {peer}", mean(ours) / mean(theirs), 1.0, detail, at_least=True))
    return outcomes


def _passes(streams: list[Stream], part: slice) -> tuple[float, float]:
    """Passes with a gradient and without, a stream."""
    gradients, probes = (
        mean(sum(fold[kind] for fold in stream["folds"][part]) for stream in streams)
        for kind in ("gradients", "probes")
    )
    return gradients, probes


def _spell(ours: tuple[float, float], theirs: tuple[float, float]) -> str:
    return " / ".join(f"({gradients:.0f} gradients + {probes:.0f} probes)" for gradients, probes in (ours, theirs))


def _spent(streams: list[Stream], part: slice) -> Spent:
    """Seconds a stream."""
    wall, cpu = (
        mean(sum(fold[kind] for fold in stream["folds"][part]) for stream in streams) for kind in ("wall", "cpu")
    )
    return Spent(wall, cpu)


def _accuracy(values: list[float]) -> str:
    return f"{mean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


if __name__ == "__main__":
    sys.exit(main())
