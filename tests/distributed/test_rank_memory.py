"""What a rank of `ode` or `steer` holds: less, the more ranks there are."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torchrun
from safetensors.torch import load_file, save_file

import mergeway as mw

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def anonymous(pid: int | None) -> int:
    """Bytes of a process that belong to no file; 0 once it is gone."""
    try:
        return 1024 * int(re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])
    except (OSError, TypeError):
        return 0


def peak(job: subprocess.Popen, ranks: int) -> int:
    """The most that any rank held at a time."""
    found, pids = 0, [None] * ranks
    while job.poll() is None:
        if None in pids:
            pids = [torchrun.rank_of(job, rank) for rank in range(ranks)] if ranks > 1 else [job.pid]
        found = max([found, *map(anonymous, pids)])
        time.sleep(0.02)
    assert job.returncode == 0, job.stderr.read()[-2000:]
    return found


@pytest.mark.parametrize(("rule", "options"), [("ode", {"step": 0.5}), ("steer", {"steps": 1})])
def test_a_rank_holds_less_the_more_there_are(tmp_path, rule, options):
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=384, intermediate_size=1536, num_hidden_layers=16, num_attention_heads=6, image_size=8, patch_size=4
    )
    ViTForImageClassification(config).save_pretrained(tmp_path / "base")
    base = load_file(tmp_path / "base" / "model.safetensors")
    assert sum(t.numel() for t in base.values()) > 28e6
    rng = np.random.default_rng(0)
    for task in ("first", "second"):
        ViTForImageClassification(config).save_pretrained(tmp_path / task)
        tuned = {n: t + 0.002 * torch.randn_like(t) for n, t in base.items()}
        save_file(tuned, tmp_path / task / "model.safetensors", metadata={"format": "pt"})
        pictures = rng.integers(0, 256, (8, 8, 8, 3)).astype(np.uint8)
        np.savez(tmp_path / f"{task}.npz", x_train=pictures, y_train=np.arange(8) % 2)
    peaks = {}
    for ranks in (1, 4):
        trunk = tmp_path / f"trunk-{ranks}"
        mw.Trunk.create(trunk, tmp_path / "base", rule, **options).add(
            tmp_path / "first", data=str(tmp_path / "first.npz")
        )
        words = ["add", trunk, tmp_path / "second", "--data", tmp_path / "second.npz", "--threads", "1"]
        line = [sys.executable, "-m", "mergeway", *map(str, words)]
        alone = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": torchrun.ENVIRONMENT}
        job = torchrun.start(*words, ranks=ranks) if ranks > 1 else subprocess.Popen(line, **alone)
        peaks[ranks] = peak(job, ranks)
        for pipe in (job.stdout, job.stderr):
            pipe.close()
    # Bytes a parameter: 12 on one rank and 20/4 on each of four by `ode`, 19 and 26/4 + 2 by `steer`. An import takes 350 MB of either.
    assert peaks[4] < 0.87 * peaks[1], peaks
