"""What an `ode` merge costs beyond its passes over the calibration samples: time and memory against bare PyTorch.

The peer makes as many forward-backward and forward-only passes over the same samples in the same micro-batches with a plain
module, its pixels prepared beforehand. Memory: the peer's own peak holds the model, one gradient and the activations; the
merge may hold θ and θ1 besides. It is measured on a generated tower that is large against its activations.

    python benchmarks/ode.py [--suite SUITE] [--samples 512] [--data DIR] [--runs 3]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from measure import HERE, Outcome, Ratio, Spent, anonymous_memory, data_directory, finish, options, report, start

MINI8 = Path(os.environ.get("MERGEWAY_MINI8", HERE.parents[1] / "shared" / "suites" / "mini8"))
UNTIL = 0.5
# Hidden width, layers, images a task: about what mini8 is, and a tower of 114 MB.
SMALL, LARGE = (128, 6, 1024), (768, 4, 16)


def main(arguments: list[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--suite", type=Path, help="a suite of kind clip-vision; by default mini8, or a generated one")
    parser.add_argument("--samples", type=int, default=512, help="calibration samples (default 512)")
    return report(measure(parser.parse_args(arguments)))


def measure(chosen: argparse.Namespace) -> list[Outcome]:
    """Time on a suite, memory on a generated tower."""
    given, samples = getattr(chosen, "suite", None), getattr(chosen, "samples", 512)
    with data_directory(chosen.data) as data:
        suite = given or (MINI8 if (MINI8 / "suite.json").exists() else write_suite(data / "tower-small", *SMALL))
        large = write_suite(data / "tower-large", *LARGE)
        return [time_ratio(suite, samples, chosen.runs), memory_ratio(large, data, 2 * LARGE[2])]


def time_ratio(suite: Path, samples: int, runs: int) -> Ratio:
    """The shortest merge against the shortest bare passes, in processes that take turns."""
    ours = theirs = Spent(float("inf"), float("inf"))
    for _ in range(runs):
        wall, cpu, backward, forward = finish("ode", start(fold(suite, samples), 1)).split()
        ours = Spent(min(ours.wall, float(wall)), min(ours.cpu, float(cpu)))
        wall, cpu = finish("bare passes", start(passes(suite, samples, int(backward), int(forward)), 1)).split()
        theirs = Spent(min(theirs.wall, float(wall)), min(theirs.cpu, float(cpu)))
    return Ratio(
        "time of an ode merge / bare passes",
        ours.wall / theirs.wall,
        1.05,
        f"{ours} / {theirs}, {backward} gradients and {forward} losses over {samples} samples",
    )


def memory_ratio(suite: Path, scratch: Path, samples: int) -> Ratio:
    """The peak of the merge against the peer's with two more vectors."""
    vector = (suite / "base" / "model.safetensors").stat().st_size
    ours = anonymous_memory("ode", lambda _: fold(suite, samples), 1, scratch)
    bare = anonymous_memory("bare passes", lambda _: passes(suite, samples, 3, 1), 1, scratch)
    return Ratio(
        "memory of an ode merge / model, 3 vectors and activations",
        ours / (bare + 2 * vector),
        1.05,
        f"{ours / 1e6:.0f} MB / ({bare / 1e6:.0f} + 2 × {vector / 1e6:.0f}) MB",
    )


def fold(suite: Path, samples: int) -> list[str]:
    return [sys.executable, str(HERE / "peers/ode_fold.py"), str(suite), str(samples), str(UNTIL), *tasks(suite)]


def passes(suite: Path, samples: int, backward: int, forward: int) -> list[str]:
    script = str(HERE / "peers/bare_passes.py")
    return [sys.executable, script, str(suite), str(samples), str(backward), str(forward), *tasks(suite)]


def tasks(suite: Path) -> list[str]:
    """The first two tasks of a suite."""
    return [row["name"] for row in json.loads((suite / "suite.json").read_text())["tasks"][:2]]


def write_suite(folder: Path, width: int, layers: int, images: int) -> Path:
    """Two random experts of a random vision tower with random images: what they learn does not change what they cost."""
    if (folder / "suite.json").exists():
        return folder
    import numpy as np
    import torch
    from safetensors.torch import save_file
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    config = CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        image_size=32,
        patch_size=8,
        projection_dim=width,
    )
    model = CLIPVisionModelWithProjection(config)
    model.save_pretrained(folder / "base")
    base = {name: weight.clone() for name, weight in model.state_dict().items()}
    rows = []
    for name in ("first", "second"):
        tuned = {n: w + 0.01 * torch.randn_like(w) if "encoder" in n else w for n, w in base.items()}
        model.load_state_dict(tuned)
        model.save_pretrained(folder / name)
        save_file(
            {"weight": torch.nn.functional.normalize(torch.randn(10, width), dim=-1)}, folder / f"{name}.safetensors"
        )
        x, y = rng.integers(0, 256, (images, 32, 32, 3), dtype=np.uint8), rng.integers(0, 10, images)
        np.savez(folder / f"{name}.npz", x_train=x, y_train=y, x_test=x[:8], y_test=y[:8])
        rows.append({"name": name, "expert": name, "data": f"{name}.npz", "head": f"{name}.safetensors"})
    settings = {"logit_scale": 20.0, "image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    # Last, so that a directory with a description is a complete one.
    (folder / "suite.json").write_text(
        json.dumps({"name": folder.name, "kind": "clip-vision", "base": "base", **settings, "tasks": rows})
    )
    return folder


if __name__ == "__main__":
    sys.exit(main())
