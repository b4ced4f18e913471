"""While a model is worked out, the disk already writes what is finished of it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from mergeway.checkpoint.writer import FileWriter
from mergeway.core.tensors import TensorInfo

IO = Path("/proc/self/io")
SIDE = 4096


def never_written() -> int:
    """The bytes that this process has written to files that were gone before the disk had begun with them."""
    counts = dict(line.split(": ") for line in IO.read_text().splitlines())
    return int(counts["cancelled_write_bytes"])


def written(path: Path, rows: int, order: list[int]) -> FileWriter:
    """A file of one tensor, written by blocks of so many rows."""
    writer = FileWriter(path, {"weight": TensorInfo((SIDE, SIDE), torch.float32)})
    for block in order:
        writer.write("weight", block * rows * SIDE, torch.full((rows, SIDE), float(block)))
    return writer


@pytest.mark.skipif(not IO.exists(), reason="the system does not count bytes")
@pytest.mark.parametrize(
    ("rows", "order"),
    [(64, list(range(64))), (SIDE, [0]), (512, [4, 5, 6, 7, 0, 1, 2, 3])],
    ids=["in small blocks", "at once", "by halves"],
)
def test_little_is_left_for_the_end(tmp_path, rows, order):
    """67 MB, of which nothing was flushed: the system holds less than a block of it back."""
    before = never_written()
    writer = written(tmp_path / "model.safetensors", rows, order)
    time.sleep(0.5)  # the disk is asked, not waited for
    (tmp_path / "model.safetensors").unlink()
    writer._close()
    assert never_written() - before < 8 * 2**20
