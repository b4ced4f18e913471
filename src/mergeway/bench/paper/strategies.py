"""Holistic CMM Table 2: fine-tuning strategies beside each other. What is not here stands there with the figures that the paper cites.

Deviates: Continual-CLIP is the base among the classes seen; at the end these are all, so its row is that of zero-shot.
"""

from __future__ import annotations

import numpy as np

from mergeway.bench.paper.holistic import note_of_training
from mergeway.bench.paper.methods import results
from mergeway.bench.paper.study import Study
from mergeway.bench.paper.table import Entry, Table, Value, over_orders
from mergeway.calibration.description import CLASSIFIERS

# Memory, method, and what the paper prints for CIFAR-100 and ImageNet-R in ten tasks, its baselines taken from other papers.
PUBLISHED = (
    ("Θ(1)", "zero-shot", 66.91, 77.73),
    ("all data", "joint", 90.94, 87.55),
    ("Θ(N)", "RandMix", 77.04, 81.88),
    ("Θ(N)", "MaxAbs", 76.75, 82.33),
    ("Θ(N)", "Avg", 77.04, 81.87),
    ("Θ(N)", "TIES", 77.23, 82.27),
    ("Θ(N)", "iCaRL", 57.60, 43.71),
    ("Θ(N)", "L2P", 70.04, 69.33),
    ("Θ(N)", "DualPrompt", 74.31, 76.41),
    ("Θ(N)", "CODA-P", 76.4, 79.5),
    ("Θ(N)", "PROOF", 76.55, 79.7),
    ("Θ(1)", "LwF", 73.45, 82.97),
    ("Θ(1)", "EWC", 76.24, 82.42),
    ("Θ(1)", "Continual-CLIP", 68.26, 76.94),
    ("Θ(1)", "CoOp", 70.58, 78.66),
    ("Θ(1)", "MaPLe", 74.52, 79.71),
    ("Θ(1)", "AttriCLIP", 68.45, 76.53),
    ("Θ(1)", "CLIP-Adapter", 68.32, 78.1),
    ("Θ(1)", "VPT", 59.33, 74.0),
    ("Θ(1)", "ours", 77.72, 82.69),
)
CITED = ("L2P", "DualPrompt", "CODA-P", "PROOF", "CoOp", "MaPLe", "AttriCLIP", "CLIP-Adapter", "VPT")
PIECES = ("zero-shot", "joint", "merged", "iCaRL", "LwF", "EWC", "ours")


def fine_tuning_strategies(study: Study) -> Table:
    """A_N of every strategy that is run here, and the published figures of all."""
    found = results(study, PIECES)
    rows: list[list[Entry]] = []
    for memory, method, *published in PUBLISHED:
        run = found.get("zero-shot" if method == "Continual-CLIP" else method)
        reached: list[Entry] = [None, None]
        if run:
            reached = [over_orders([float(np.mean(one[c])) for one in run]) for c in CLASSIFIERS]
        rows.append([memory, method, *reached, *(Value(figure, digits=2) for figure in published)])
    columns = ("memory", "method", "frozen head", "nearest mean", "CIFAR-100, published", "ImageNet-R, published")
    title = f"Fine-tuning strategies, {study.longest} tasks of {study.suite.name}, beside the published figures"
    note = (
        f"{note_of_training(study)} Published: Table 2 of Holistic CMM, ten tasks on CLIP ViT-B/16, which took its baselines from "
        "other papers; n/a: not run here. Memory as in the paper."
    )
    return Table("holistic-2", title, columns, rows, note, (2, 11))
