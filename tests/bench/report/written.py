"""A run whose numbers are known without the code that makes runs, and how to read a page's data."""

from __future__ import annotations

import json
from pathlib import Path

TASKS = ("ants", "bees", "cats", "dogs")  # of the tiny suite

# Accuracies after each fold, by rule and order, as one could note them on paper.
ORDERS = {0: ["ants", "bees", "cats"], 1: ["cats", "ants", "bees"]}
FOLDS = {
    ("average", 0): [[90.0], [70.0, 80.0], [60.0, 72.0, 66.0]],
    ("average", 1): [[88.0], [75.0, 71.0], [64.0, 62.0, 70.0]],
    ("ode", 0): [[90.0], [84.0, 82.0], [80.0, 78.0, 76.0]],
    ("ode", 1): [[88.0], [83.0, 81.0], [79.0, 77.0, 75.0]],
}


def path_of(until: float, start: float, target: float, losses: list[float]) -> dict:
    """A trajectory as a fold records it."""
    steps = len(losses) - 1
    return {
        "until": until,
        "solver": "euler",
        "loss_start": start,
        "loss_target": target,
        "times": [until * i / steps for i in range(steps + 1)],
        "losses": losses,
        "gammas": [1.0, 0.5, 0.5][: steps + 1],
        "alignments": [0.1, 0.3, 0.3][: steps + 1],
        "distances": [3.0, 2.0, 1.5][: steps + 1],
        "evaluations": steps,
        "probes": 2,
        "shortened": 0,
        "infeasible": 0,
        "barrier": 0.0,
        "bound": 0.2,
        "rho": 0.3,
        "distance_bound": 2.5,
        "certified": True,
    }


SWEEP = {
    "suite": "tiny",
    "rule": "ode",
    "order": ORDERS[0],
    "weights": [1.0, 1.0, 1.0],
    "times": [0.0, 0.5, 1.0],
    "accuracies": {"ants": [86.0, 70.0, 20.0], "bees": [80.0, 74.0, 30.0], "cats": [10.0, 80.0, 92.0]},
    "trajectory": path_of(1.0, 1.2, 1.0, [1.2, 0.9, 1.0]),
}


def embedded(page: Path) -> dict:
    """The data that a page carries."""
    text = page.read_text(encoding="utf-8")
    start = text.index('id="data">') + len('id="data">')
    return json.loads(text[start : text.index("</script>", start)])
