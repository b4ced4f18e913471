"""OPCM with a full SVD of every linear weight, the way FusionBench computes it, as plain torch.

python full_svd_opcm.py OUT BASE ARRIVAL...
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

ALPHA = 0.5


def project(delta: Tensor, merged: Tensor) -> Tensor:
    """Coordinates in both full bases, without the diagonal and the leading block."""
    u, sigma, vt = torch.linalg.svd(merged, full_matrices=True)
    rank = int((sigma.cumsum(0) / sigma.sum() <= ALPHA).sum())
    coordinates = u.mT @ delta @ vt.mT
    coordinates.diagonal().zero_()
    coordinates[:rank, :rank] = 0
    return u @ coordinates @ vt


def norm(update: dict[str, Tensor]) -> Tensor:
    return torch.stack([tensor.norm() for tensor in update.values()]).norm()


def is_linear(name: str, tensor: Tensor) -> bool:
    return tensor.ndim == 2 and "embedding" not in name


out, *references = sys.argv[1:]
base, *arrivals = (load_file(f"{reference}/model.safetensors") for reference in references)
merged: dict[str, Tensor] = {}
mean_norm, lam = torch.tensor(0.0), torch.tensor(1.0)
for t, arrival in enumerate(arrivals, 1):
    delta = {name: arrival[name] - base[name] for name in base}
    mean_norm = (t - 1) / t * mean_norm + norm(delta) / t
    if t == 1:
        merged = delta
        continue
    projected = {n: project(d, merged[n]) if is_linear(n, d) else d for n, d in delta.items()}
    total = {name: lam * merged[name] + projected[name] for name in base}
    lam = norm(total) / mean_norm
    merged = {name: tensor / lam for name, tensor in total.items()}
Path(out).mkdir()
save_file({n: base[n] + merged[n] for n in base}, f"{out}/model.safetensors", metadata={"format": "pt"})
