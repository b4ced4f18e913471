"""The certificate over a stream, from a trunk's journal: each task's loss when it was folded in and now, and the worst of them."""

from __future__ import annotations

from collections.abc import Sequence

from mergeway.bench.certificates import ROUNDING
from mergeway.trunk.journal import Record


def stream_certificate(records: Sequence[Record]) -> dict[str, object] | None:
    """How many folds are certified, within their bound, and kept that of the stream; the tasks; None where nothing was measured.

    A task's `barrier` is the highest of its own over all folds: its loss at a path's end above the line between its two ends.
    """
    folds = [r.details for r in records if "stream" in r.details]
    if not folds:
        return None
    last = folds[-1]["stream"]
    rows = [
        {
            "task": t,
            "folded": last["after"][t] - rise,
            "now": last["after"][t],
            "rise": rise,
            "barrier": max(fold["stream"]["barriers"][t] for fold in folds if t in fold["stream"]["barriers"]),
        }
        for t, rise in last["rises"].items()
    ]
    paths = [fold["trajectory"] for fold in folds]
    return {
        "folds": len(folds),
        "certified": sum(bool(path["certified"]) for path in paths),
        "within": sum(path["barrier"] <= path["bound"] + ROUNDING for path in paths),
        "kept": sum(bool(fold["stream"]["certified"]) for fold in folds),
        "budget": last["budget"],
        "worst": last["worst"],
        "tasks": rows,
    }
