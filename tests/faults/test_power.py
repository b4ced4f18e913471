"""Every command that writes to a disk that loses what was not flushed, and a power cut behind each of its calls.

What the command has reported as done is there; of what it had not, the old or the new. A few commands always run, all of
them under `slow`; `-s` prints the counts.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import ROWS, Inputs, Row
from disk import recorded
from test_every_fault import bits_of, committed

import mergeway as mw
from mergeway.cli import main

# What these write is no one thing: folds and saves one after another, or files that are gone when the command ends.
OTHER = ("finetune", "bench", "push", "prune")
ALWAYS = ("add", "tag", "replay")


def cut_everywhere(row: Row, inputs: Inputs, folder: Path) -> int:
    """How many different states of the disk a cut can leave; each is looked at."""
    root = folder / "root"
    root.mkdir()
    row.start(inputs, root)
    before = bits_of(row, root)
    with recorded(root) as disk:
        assert main([str(word) for word in row.words(inputs, root)]) == 0
    try:
        after, count = bits_of(row, root), 0
        for cut, made in disk.cuts(folder / "cuts"):
            where = f"{row}: {disk.calls[: cut + 1]}"
            state = committed(bits_of(row, made), before, after)
            assert state == "after" if cut == disk.last else state, where
            for name in ("trunk", "out"):
                if (made / name / "trunk.json").exists():
                    assert mw.Trunk.open(made / name, threads=1).verify() == [], where
            count += 1
    finally:
        disk.close()
    return count


@pytest.mark.parametrize("row", [row for row in ROWS if row.name in ALWAYS], ids=str)
def test_power_cuts(row, inputs, tmp_path):
    assert cut_everywhere(row, inputs, tmp_path) > 3


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ROWS if row.name not in OTHER], ids=str)
def test_power_cuts_in_every_command(row, inputs, tmp_path, capsys):
    count = cut_everywhere(row, inputs, tmp_path)
    with capsys.disabled():
        print(f"\n{row}: {count} power cuts", flush=True)
