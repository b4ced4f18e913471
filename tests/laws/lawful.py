"""What the laws draw from: small streams of every tensor shape, and every rule in every form."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

Model = dict[str, Tensor]

# The same examples in every run: a law that fails on one machine can be looked at on another.
few = settings(max_examples=5, derandomize=True, deadline=None)
some = settings(max_examples=20, derandomize=True, deadline=None)

RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "average": ("average", {}),
    "task-arithmetic sum": ("task-arithmetic", {"form": "sum"}),
    "task-arithmetic mean": ("task-arithmetic", {"form": "mean"}),
    "ties base": ("ties", {"form": "base"}),
    "ties compound": ("ties", {"form": "compound"}),
    "ties mean": ("ties", {"form": "mean", "density": 0.5}),
    "opcm": ("opcm", {}),
    "opcm projected": ("opcm", {"norms": "projected", "alpha": 0.8}),
    "opcm sqrt": ("opcm", {"scale": "sqrt"}),
    "magmax": ("magmax", {}),
    "randmix": ("randmix", {"seed": 3}),
    "iso": ("iso", {}),
    "dop": ("dop", {"steps": 4}),
}


@dataclass(frozen=True)
class Stream:
    """A base, arrivals and their weights."""

    base: Model
    arrivals: list[Model]
    weights: list[float]


@st.composite
def streams(
    draw: st.DrawFn,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64, torch.bfloat16, torch.float16),
    longest: int = 4,
) -> Stream:
    """Two to `longest` arrivals; some updates are of low rank, as adapters are."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from(dtypes))
    side, other = draw(st.integers(2, 12)), draw(st.integers(2, 20))
    shapes: dict[str, tuple[int, ...]] = {
        "square.weight": (side, side),
        "wide.weight": (side, side + other),
        "tall.weight": (side + other, side),
        "bias": (other,),
        "conv.weight": (3, 2, 2, side),
        "embed_tokens.weight": (other, side),
        "logit_scale": (),
    }
    count = draw(st.integers(2, longest))
    ranks = [draw(st.sampled_from([None, 1, 2])) for _ in range(count)]
    weights = [draw(st.sampled_from([0.25, 0.7, 1.0, 2.0, 5.0])) for _ in range(count)]

    def change(shape: tuple[int, ...], rank: int | None) -> Tensor:
        if rank is None or len(shape) != 2:
            return torch.randn(shape, generator=generator)
        return torch.randn(shape[0], rank, generator=generator) @ torch.randn(rank, shape[1], generator=generator)

    base = {name: 0.5 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    arrivals = [
        {name: (base[name] + 0.1 * change(shape, rank)).to(dtype) for name, shape in shapes.items()} for rank in ranks
    ]
    buffer = {"position_ids": torch.arange(5)}
    base = {name: tensor.to(dtype) for name, tensor in base.items()}
    return Stream(base | buffer, [a | buffer for a in arrivals], weights)


def save(folder: Path, stream: Stream) -> tuple[Path, list[Path]]:
    """The stream as one file for each model."""
    paths = [folder / "base.safetensors", *(folder / f"task{k}.safetensors" for k in range(len(stream.arrivals)))]
    for path, model in zip(paths, [stream.base, *stream.arrivals], strict=True):
        save_file(model, path)
    return paths[0], paths[1:]


def save_shards(folder: Path, model: Model, count: int) -> Path:
    """A model directory of that many shards with an index, tensors dealt out in turn."""
    folder.mkdir()
    weight_map = {}
    for shard in range(count):
        names = list(model)[shard::count]
        file = f"model-{shard + 1:05d}-of-{count:05d}.safetensors"
        save_file({name: model[name] for name in names}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def same_bits(a: Model, b: Model) -> bool:
    """Whether two models are equal to the bit; unlike ==, this tells 0.0 from −0.0."""
    return a.keys() == b.keys() and all(bits(a[name]) == bits(b[name]) for name in a)


def bits(tensor: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """A tensor as something to compare exactly."""
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def update_of(base: Model, model: Model) -> dict[str, Tensor]:
    """What was added to the base, in float64."""
    return {n: model[n].double() - base[n].double() for n in base if base[n].is_floating_point()}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """‖a − b‖ over all tensors."""
    return sum(float((a[n] - b[n]).norm()) ** 2 for n in a) ** 0.5


def length(update: dict[str, Tensor]) -> float:
    """‖update‖ over all tensors."""
    return sum(float(t.norm()) ** 2 for t in update.values()) ** 0.5
