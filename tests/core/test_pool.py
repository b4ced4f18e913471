"""A walk does not have the system clear the same pages again and again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

SIZE = 1 << 22  # elements of each of four tensors

# How many pages the system hands to a process while it folds.
FOLD = """
import resource, sys
from pathlib import Path
from mergeway.fold.merge import merge_into

folder = Path(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
merge_into(folder / "out", folder / "base", [folder / "a", folder / "b"], "average", threads=1)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps freed memory in its own way")
def test_blocks_that_a_fold_frees_are_there_for_the_next(tmp_path):
    for seed, name in enumerate(("base", "a", "b")):
        torch.manual_seed(seed)
        (tmp_path / name).mkdir()
        tensors = {f"t{k}": torch.randn(SIZE, dtype=torch.bfloat16) for k in range(4)}
        save_file(tensors, tmp_path / name / "model.safetensors", {"format": "pt"})
    run = subprocess.run([sys.executable, "-c", FOLD, tmp_path], capture_output=True, check=True, text=True)
    # Each arrival needs four float32 blocks for every one that it folds: as many pages as the walk has float32 numbers, four times.
    pages = 2 * 4 * 4 * (4 * SIZE) // 4096
    assert int(run.stdout) < pages / 10, f"{run.stdout} of {pages}"
