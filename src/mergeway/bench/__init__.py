"""The benchmark: streams of a suite's experts in seeded orders, folded by rules and judged after every fold."""

from mergeway.bench.ends import end_accuracies as end_accuracies
from mergeway.bench.protocol import Cell as Cell
from mergeway.bench.protocol import plan as plan
from mergeway.bench.run import Run as Run
from mergeway.bench.run import bench as bench
from mergeway.bench.stream import run_cell as run_cell
