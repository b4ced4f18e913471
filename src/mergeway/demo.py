"""A generated stream: a small transformer-shaped base and arrivals with a shared and a private low-rank update."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mergeway.errors import TrunkError
from mergeway.progress import Progress
from mergeway.rules import RULES
from mergeway.trunk import Trunk

ARRIVALS = 5
_WIDTH, _LAYERS = 96, 4


def run_demo(progress: Progress) -> list[dict[str, Any]]:
    """Fold the stream into a trunk by every data-free rule; what each keeps of the arrivals."""
    with tempfile.TemporaryDirectory(prefix="mergeway-demo-") as scratch:
        folder = Path(scratch)
        base, arrivals = _write_stream(folder)
        return [_measure(rule, folder, base, arrivals, progress) for rule in RULES if not RULES[rule].needs]


def _measure(
    rule: str, folder: Path, base: dict[str, Tensor], arrivals: list[dict[str, Tensor]], progress: Progress
) -> dict[str, Any]:
    progress.note(f"folding with {rule}")
    started = time.perf_counter()
    trunk = Trunk.create(folder / rule, folder / "base.safetensors", rule)
    for k in range(ARRIVALS):
        trunk.add(folder / f"task{k}.safetensors")
    seconds = time.perf_counter() - started
    if problems := trunk.verify():
        raise TrunkError(problems[0])
    merged = trunk.params()
    update = _flat({name: merged[name] - base[name] for name in base})
    deltas = [_flat({name: arrival[name] - base[name] for name in base}) for arrival in arrivals]
    kept = [float(update @ d / (d @ d)) for d in deltas]
    mean = sum(float(d.norm()) for d in deltas) / len(deltas)
    return {
        "rule": rule,
        "length": float(update.norm()) / mean,
        "first": kept[0],
        "last": kept[-1],
        "least": min(kept),
        "seconds": seconds,
    }


def _write_stream(folder: Path) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (500, _WIDTH)}
    for layer in range(_LAYERS):
        for name, shape in (
            ("attention", (_WIDTH, _WIDTH)),
            ("up", (2 * _WIDTH, _WIDTH)),
            ("down", (_WIDTH, 2 * _WIDTH)),
        ):
            shapes[f"layers.{layer}.{name}.weight"] = shape
            shapes[f"layers.{layer}.{name}.bias"] = shape[:1]
    base = {name: normal(*shape) for name, shape in shapes.items()}
    common = {name: _low_rank(normal, shape) for name, shape in shapes.items()}
    arrivals = []
    for k in range(ARRIVALS):
        arrivals.append(
            {
                name: base[name] + 0.01 * (0.5 * common[name] + _low_rank(normal, shape))
                for name, shape in shapes.items()
            }
        )
        save_file(arrivals[k], folder / f"task{k}.safetensors")
    save_file(base, folder / "base.safetensors")
    return base, arrivals


def _low_rank(normal: Any, shape: tuple[int, ...], rank: int = 8) -> Tensor:
    return normal(*shape) if len(shape) == 1 else normal(shape[0], rank) @ normal(rank, shape[1]) / rank**0.5


def _flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1).double() for t in tensors.values()])
