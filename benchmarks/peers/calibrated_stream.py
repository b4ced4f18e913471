"""A stream folded by a rule that needs calibration data; prints passes, seconds and accuracies as one line of JSON.

Passes are counted where they happen, at the model: the rows that went through it with and without a gradient, against the
number of calibration samples. Neither rule is asked what it thinks it has spent.

    python calibrated_stream.py SUITE SAMPLES SEED RULE key=value,... TASK TASK...
"""

import json
import sys
import time

import torch

import mergeway as mw
from mergeway.fold.merge import fold_steps
from mergeway.rules import make

torch.set_num_threads(1)
suite = mw.load_suite(sys.argv[1])
samples, seed = map(int, sys.argv[2:4])
rule = make(sys.argv[4], dict(pair.split("=") for pair in sys.argv[5].split(",") if pair))
tasks = sys.argv[6:]
rows = {"gradients": 0, "probes": 0}


def counted(params, inputs, head):
    """The suite's model, and a count of the rows it sees."""
    rows["gradients" if torch.is_grad_enabled() else "probes"] += len(next(iter(inputs.values())))
    return suite.model(params, inputs, head)


objective = mw.Objective(counted, [suite.samples(n, "train") for n in tasks], size=samples, seed=seed)
experts = [suite.task(n).expert for n in tasks]
folds = []
wall, cpu = time.perf_counter(), time.process_time()
for step in fold_steps(suite.base, experts, rule, None, objective):
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    folds.append({"wall": wall, "cpu": cpu, **{kind: count / samples for kind, count in rows.items()}})
    rows.update(gradients=0, probes=0)
    merged = step.params
    wall, cpu = time.perf_counter(), time.process_time()
print(json.dumps({"folds": folds, "accuracies": [suite.accuracy(merged, n) for n in tasks]}))
