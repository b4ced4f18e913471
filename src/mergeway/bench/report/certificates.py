"""The certificate over a stream, from a trunk's journal: each task's loss when it was folded in and now, and the worst of them."""

from __future__ import annotations

from collections.abc import Sequence

from mergeway.trunk.journal import Record


def stream_certificate(records: Sequence[Record]) -> dict[str, object] | None:
    """How many folds are certified, how many kept the bound of the stream, and the tasks; None where nothing was measured."""
    folds = [r.details for r in records if "stream" in r.details]
    if not folds:
        return None
    last = folds[-1]["stream"]
    rows = [
        {"task": t, "folded": last["after"][t] - rise, "now": last["after"][t], "rise": rise}
        for t, rise in last["rises"].items()
    ]
    return {
        "folds": len(folds),
        "certified": sum(bool(fold["trajectory"]["certified"]) for fold in folds),
        "kept": sum(bool(fold["stream"]["certified"]) for fold in folds),
        "budget": last["budget"],
        "worst": last["worst"],
        "tasks": rows,
    }
