"""What the programs wrote, and how far apart it is."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# A parameter of a module that has modules below it, which FusionBench's OPCM passes over: the first arrival's stays.
FORGOTTEN = frozenset({"vision_model.embeddings.class_embedding"})


def read_output(out: Path) -> dict[str, Tensor]:
    """The merged weights; of FusionBench, which keeps a checkpoint for every arrival, the last."""
    import torch
    from safetensors.torch import load_file

    if (out / "model.safetensors").exists():
        return load_file(out / "model.safetensors")
    last = max((out / "checkpoints").iterdir(), key=lambda path: int(path.stem.rpartition("_")[2]))
    return torch.load(last) if last.suffix == ".pth" else load_file(last / "model.safetensors")


def difference(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], base: dict[str, Tensor], without: Collection[str] = ()
) -> float:
    """‖our update − their update‖ / ‖their update‖."""
    names = [name for name in base if name not in without]
    gap = sum(float((ours[n] - theirs[n]).double().norm()) ** 2 for n in names)
    return (gap / sum(float((theirs[n] - base[n]).double().norm()) ** 2 for n in names)) ** 0.5
