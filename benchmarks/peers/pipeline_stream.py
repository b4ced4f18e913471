"""The whole pipeline through a trunk, in one process: tune each task from the trunk, fold it in with its moments, align.

python pipeline_stream.py SUITE TASKS FOLDER
"""

import gc
import shutil
import sys
from pathlib import Path

from mergeway import Trunk
from mergeway.bench.suite import load_suite
from mergeway.train import Training, finetune

suite, count, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
trunk = Trunk.create(folder / "trunk", load_suite(suite).base, "fisher", keep=2, threads=1)
training = Training(steps=2, lr=1e-4, batch=8, tangent=True)
for number, task in enumerate(load_suite(suite).tasks[:count]):
    arrival = folder / "arrival"
    # A suite remembers the data it was asked for; a new one knows the task in hand alone, as a command does.
    finetune(load_suite(suite), task.name, arrival, training, start=folder / "trunk" if number else None)
    trunk.add(arrival, task=task.name)
    shutil.rmtree(arrival)
    if number:
        trunk.align(f"{suite}#{task.name}", tangent=True)
    # Models refer to themselves; those of the last task that wait for the collector are none of the stream's memory.
    gc.collect()
