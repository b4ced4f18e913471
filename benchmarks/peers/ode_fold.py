"""One `ode` fold of the second of two experts; prints wall and CPU seconds, the gradients and the passes without one.

python ode_fold.py SUITE SAMPLES TIME TASK TASK
"""

import sys
import time

import torch

import mergeway as mw
from mergeway.rules import Fold, Ode

torch.set_num_threads(1)
suite = mw.load_suite(sys.argv[1])
samples, until, names = int(sys.argv[2]), float(sys.argv[3]), sys.argv[4:6]
objective = suite.objective(names, size=samples)


def read(name):
    from mergeway.checkpoint import open_checkpoint

    found = open_checkpoint(suite.task(name).expert)
    return {n: found.read(n) for n, i in found.infos.items() if i.merges}


old, new = map(read, names)
wall, cpu = time.perf_counter(), time.process_time()
done = Ode(time=until).merge(Fold(2, 1.0, 2.0), old, {"model": old}, new, objective)
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
told = done.details["trajectory"]
print(wall, cpu, told["evaluations"], told["probes"])
