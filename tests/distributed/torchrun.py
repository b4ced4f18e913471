"""Starting several real processes that work together, on this machine's loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}


def start(*words: object, ranks: int = 2, **options) -> subprocess.Popen[str]:
    """`torchrun --nproc-per-node RANKS -m mergeway WORDS`, under way."""
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--rdzv-backend", "c10d"]
    line += ["--rdzv-endpoint", "localhost:0", "-m", "mergeway", *map(str, words)]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, **options)


def finish(job: subprocess.Popen[str], seconds: float = 240) -> tuple[int, str, str]:
    """Exit code and what was printed."""
    try:
        out, err = job.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        job.kill()
        out, err = job.communicate()
        raise AssertionError(f"the job did not end: {err[-2000:]}") from None
    return job.returncode, out, err


def rank_of(job: subprocess.Popen[str], rank: int) -> int | None:
    """The process of a rank, once it is there."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(path.joinpath("stat").read_text().rsplit(")", 1)[1].split()[1])
            if parent == job.pid and f"\0RANK={rank}\0" in "\0" + path.joinpath("environ").read_text():
                return int(path.name)
        except (OSError, ValueError):
            continue
    return None
