"""What tests share besides fixtures: the tensors of a small stream, the data-free rules, and a listing of a directory."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch

import mergeway as mw
from mergeway.rules import RULES

# The rules that need nothing but checkpoints.
DATA_FREE = [name for name, rule in RULES.items() if not rule.needs]

Tensors = dict[str, torch.Tensor]

# A square, a wide and a tall matrix, an embedding, a convolution, a vector, a scalar.
SHAPES: dict[str, tuple[int, ...]] = {
    "embed_tokens.weight": (11, 6),
    "layer.square.weight": (6, 6),
    "layer.wide.weight": (4, 10),
    "layer.tall.weight": (10, 4),
    "layer.bias": (6,),
    "conv.weight": (3, 2, 3, 3),
    "logit_scale": (),
}


def draw_tensors(seed: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> Tensors:
    """Normal values, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def listing(*roots: Path) -> dict[str, str]:
    """Every file and directory below the roots with a digest of its bytes: two listings are equal when nothing changed."""
    found = {}
    for root in roots:
        for path in [root, *sorted(root.rglob("*"))]:
            if path.is_symlink():
                found[str(path)] = f"-> {os.readlink(path)}"
            elif path.is_file():
                found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
            elif path.is_dir():
                found[str(path)] = "directory"
    return found


def committed(trunk: Path) -> dict[str, str]:
    """Every file that belongs to the trunk's commits; not what a writer is in the middle of."""
    recorded = {f"{r.step:06d}" for r in mw.Trunk.open(trunk).log()}
    files = {Path(p).relative_to(trunk): digest for p, digest in listing(trunk).items() if digest != "directory"}
    ours = {Path("trunk.json"), Path("journal.jsonl")}
    return {str(p): d for p, d in files.items() if p in ours or (p.parts[0] == "steps" and p.parts[1] in recorded)}
