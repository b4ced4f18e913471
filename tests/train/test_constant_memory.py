"""The whole pipeline takes no more memory for twenty tasks than for two, measured in real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "pipeline.py"


@pytest.mark.slow
def test_twenty_tasks_take_the_memory_of_two(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--runs", "1", "--data", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "20 tasks / 2 tasks" in done.stdout
