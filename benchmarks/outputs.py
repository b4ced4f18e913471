"""What the programs wrote, and how far apart it is."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

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


class Difference(NamedTuple):
    """‖our update − their update‖ / ‖their update‖, and what is left of it when their update may have another length."""

    whole: float
    direction: float


def difference(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], base: dict[str, Tensor], without: Collection[str] = ()
) -> Difference:
    """How far the two updates are apart."""
    gap = own = peer = along = 0.0
    for n in base:
        if n not in without:
            origin, a, b = (model[n].double() for model in (base, ours, theirs))
            gap += float((a - b).norm()) ** 2
            own += float((a - origin).norm()) ** 2
            peer += float((b - origin).norm()) ** 2
            along += float(((a - origin) * (b - origin)).sum())
    return Difference((gap / peer) ** 0.5, (max(0.0, own - along**2 / peer) / peer) ** 0.5)
