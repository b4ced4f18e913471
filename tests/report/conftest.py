"""A run whose files are written by hand, and the command that reports it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from written import FOLDS, ORDERS, SWEEP, TASKS, embedded, path_of


@dataclass
class WrittenRun:
    """A run on disk and the lines that were written into it."""

    path: Path
    rows: list[dict] = field(default_factory=list)


@pytest.fixture
def written(tmp_path) -> WrittenRun:
    made = WrittenRun(tmp_path / "run")
    made.path.mkdir()
    about = {
        "suite": "tiny",
        "rules": ["average", "ode"],
        "lengths": [3],
        "orders": 2,
        "utilities": "uniform",
        "samples": 64,
        "version": "0.1.0",
    }
    ends = {"base": {"ants": 50.0, "bees": 55.0, "cats": 60.0}, "experts": {"ants": 90.0, "bees": 91.0, "cats": 92.0}}
    timings = []
    for (rule, number), matrix in FOLDS.items():
        for k, accuracies in enumerate(matrix, 1):
            traced = rule == "ode" and k > 1
            key = f"{rule}.3.{number}"
            made.rows.append(
                {
                    "key": key,
                    "length": 3,
                    "fold": k,
                    "task": ORDERS[number][k - 1],
                    "accuracies": accuracies,
                    "facts": {"gradients": 2} if traced else {},
                    "details": {"trajectory": path_of(1 / k, 1.2, 1.0, [1.2, 1.1, 1.0])} if traced else {},
                }
            )
            timings.append({"key": key, "fold": k, "seconds": 0.25 * k})
    (made.path / "run.json").write_text(json.dumps(about))
    (made.path / "ends.json").write_text(json.dumps(ends))
    (made.path / "folds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made.rows))
    (made.path / "timings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in timings))
    return made


@pytest.fixture
def swept(written) -> WrittenRun:
    """The same run with a sweep."""
    (written.path / "sweep.json").write_text(json.dumps(SWEEP))
    return written


@pytest.fixture
def report(call, tmp_path):
    """Writes a report with the command and returns its path and the data inside."""

    def make(source, *words) -> tuple[Path, dict]:
        out = tmp_path / "report.html"
        assert call("report", source, "--out", out, "--json", *words).json()["report"] == str(out)
        return out, embedded(out)

    return make


@pytest.fixture(scope="session")
def suite(tmp_path_factory):
    """Four tasks of random pictures for a tiny CLIP vision tower; the experts are noisy copies of it."""
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    folder = tmp_path_factory.mktemp("suite")
    torch.manual_seed(0)
    config = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        projection_dim=8,
    )
    model = CLIPVisionModelWithProjection(config)
    model.save_pretrained(folder / "base")
    base = {n: p.clone() for n, p in model.state_dict().items()}
    draw = np.random.default_rng(0)
    for task in TASKS:
        noisy = {n: p + 0.2 * torch.randn_like(p) if p.is_floating_point() else p for n, p in base.items()}
        model.load_state_dict(noisy)
        model.save_pretrained(folder / task)
        save_file(
            {"weight": torch.nn.functional.normalize(torch.randn(4, 8), dim=-1)}, folder / f"{task}-head.safetensors"
        )
        arrays = {}
        for split, count in (("train", 24), ("test", 40)):
            arrays[f"x_{split}"] = draw.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
            arrays[f"y_{split}"] = draw.integers(0, 4, count)
        np.savez(folder / f"{task}.npz", **arrays)
    described = {
        "name": "tiny",
        "kind": "clip-vision",
        "base": "base",
        "logit_scale": 10.0,
        "image_mean": [0.5] * 3,
        "image_std": [0.25] * 3,
        "tasks": [{"name": t, "expert": t, "data": f"{t}.npz", "head": f"{t}-head.safetensors"} for t in TASKS],
    }
    (folder / "suite.json").write_text(json.dumps(described))
    return folder
