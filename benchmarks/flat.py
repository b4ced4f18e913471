"""Is an `add` at fold 2,000 as cheap as at fold 20? CPU and wall time of one `add` of a tiny model along a long stream."""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

import mergeway as mw

SHORT = 20
TIMES = 41


def main(long: int) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="mergeway-flat-") as folder:
        base = {f"layers.{k}.weight": torch.randn(16, 16) for k in range(4)}
        arrival = Path(folder) / "arrival.safetensors"
        save_file(base, Path(folder) / "base.safetensors")
        paths = {step: Path(folder) / f"trunk-{step}" for step in (SHORT, long)}
        trunk = mw.Trunk.create(paths[long], Path(folder) / "base.safetensors", "average", threads=1)
        for step in range(1, long + 1):
            save_file({n: t + 0.01 * torch.randn_like(t) for n, t in base.items()}, arrival)
            trunk.add(arrival, f"task {step}")
            if step == SHORT:
                shutil.copytree(paths[long], paths[SHORT])
        # In turns, so that whatever else the machine does falls on both alike.
        spent: dict[int, list[tuple[float, float]]] = {step: [] for step in paths}
        for turn in range(TIMES):
            save_file({n: t + 0.01 * torch.randn_like(t) for n, t in base.items()}, arrival)
            for step, path in paths.items():
                cpu, wall = time.process_time(), time.perf_counter()
                mw.Trunk.open(path, threads=1).add(arrival, f"turn {turn}")
                spent[step].append((time.process_time() - cpu, time.perf_counter() - wall))
        for step, times in spent.items():
            cpu, wall = (1e3 * statistics.median(t) for t in zip(*times, strict=True))
            print(
                f"add at fold {step:<5} CPU {cpu:6.2f} ms, wall {wall:6.2f} ms, least CPU {1e3 * min(times)[0]:.2f} ms"
            )
        medians = [statistics.median(t[0] for t in times) for times in spent.values()]
        print(f"fold {long} against fold {SHORT}: {medians[1] / medians[0]:.2f}")
        began = time.process_time()
        assert trunk.verify() == []
        size = (paths[long] / "journal.jsonl").stat().st_size
        print(f"verify at fold {long}: {1e3 * (time.process_time() - began):.0f} ms for a journal of {size} bytes")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
