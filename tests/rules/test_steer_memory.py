"""How much a fold of `steer` holds for each parameter: the model, its gradient, two moments, and its directions in bfloat16."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

WIDTH = 768
FEW, MANY = 8, 40  # square matrices of the two models

# The second fold of a trunk, watched by a thread: the peak of private memory above where it began.
FOLD = """
import re, sys, threading, time
from pathlib import Path
import mergeway as mw

def private():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def loss(params):
    return sum((t * t).sum() for t in params.values()) / 1e6

folder, ended = Path(sys.argv[1]), threading.Event()
trunk = mw.Trunk.create(folder / "trunk", folder / "base", mw.rules.make("steer", {"steps": 2}), threads=1)
trunk.add(folder / "one", objective=loss)
peak = [private()]

def watch():
    while not ended.wait(0.002):
        peak[0] = max(peak[0], private())

watcher = threading.Thread(target=watch)
watcher.start()
trunk.add(folder / "two", objective=loss)
ended.set()
watcher.join()
print(peak[0])
"""


def peak(folder: Path, matrices: int) -> int:
    for seed, name in enumerate(("base", "one", "two")):
        generator = torch.Generator().manual_seed(seed)
        (folder / name).mkdir(parents=True)
        tensors = {f"layer{k}.weight": torch.randn(WIDTH, WIDTH, generator=generator) for k in range(matrices)}
        save_file(tensors, folder / name / "model.safetensors", {"format": "pt"})
    run = subprocess.run([sys.executable, "-c", FOLD, folder], capture_output=True, check=True, text=True)
    return int(run.stdout)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_a_fold_leaves_no_holes_as_large_as_the_model(tmp_path):
    """20 bytes for each parameter of a square matrix; holes had made it 28."""
    grown = peak(tmp_path / "many", MANY) - peak(tmp_path / "few", FEW)
    assert grown / ((MANY - FEW) * WIDTH**2) < 23
