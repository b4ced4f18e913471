"""One fold into a trunk in a process of its own; prints the seconds of the fold alone, wall and CPU.

python fold_once.py TRUNK ARRIVAL THREADS
"""

import sys
import time

from mergeway import Trunk

path, arrival, threads = sys.argv[1:]
trunk = Trunk.open(path, threads=int(threads))
wall, cpu = time.perf_counter(), time.process_time()
trunk.add(arrival, again=True)
print(time.perf_counter() - wall, time.process_time() - cpu)
