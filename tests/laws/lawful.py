"""What the laws draw from: small streams of every tensor shape, and every rule in every form."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call

import mergeway
from mergeway.core.tensors import is_linear
from mergeway.model.model import Network
from mergeway.rules import RULES, ModelRule, WantsGrams, WantsMoments

Model = dict[str, Tensor]

# The same examples in every run: a law that fails on one machine can be looked at on another.
few = settings(max_examples=5, derandomize=True, deadline=None)
some = settings(max_examples=20, derandomize=True, deadline=None)

# Fewer steps for the rules that search.
_QUICK: dict[str, dict[str, Any]] = {
    "dop": {"steps": 4},
    "ode": {"step": 0.25},
    "randmix": {"seed": 3},
    "steer": {"steps": 2},
}
# Every rule there is, those of installed packages too, and the forms that differ from a rule's defaults.
CASES: dict[str, tuple[str, dict[str, Any]]] = {name: (name, _QUICK.get(name, {})) for name in RULES} | {
    "task-arithmetic mean": ("task-arithmetic", {"form": "mean"}),
    "ties compound": ("ties", {"form": "compound"}),
    "ties mean": ("ties", {"form": "mean", "density": 0.5}),
    "opcm projected": ("opcm", {"norms": "projected", "alpha": 0.8}),
    "opcm sqrt": ("opcm", {"scale": "sqrt"}),
    "fisher utility": ("fisher", {"lam": "utility"}),
}


def fold(case: str, base: Model, arrivals: list[Model], weights: list[float] | None = None, **more: Any) -> Model:
    """The arrivals merged by a rule, which gets what it wants besides them."""
    rule, options = CASES[case]
    return mergeway.merge(base, arrivals, rule, weights, **wanted(case, base, len(arrivals)), **options, **more)


def wanted(case: str, base: Model, count: int) -> dict[str, Any]:
    """Moments for the rules that want them, samples for Gram matrices, a quadratic loss for the rules that ask about one."""
    kind = RULES[CASES[case][0]]
    if issubclass(kind, WantsMoments):
        return {"moments": [moments(base, k) for k in range(count)]}
    if issubclass(kind, WantsGrams):
        return {"objective": samples_of(base, count)}
    if issubclass(kind, ModelRule):
        return {"objective": quadratic(base)}
    return {}


def moments(base: Model, k: int) -> Model:
    """Squares, the same for the same k."""
    generator = torch.Generator().manual_seed(k)
    return {n: torch.randn(t.shape, generator=generator) ** 2 for n, t in base.items() if t.is_floating_point()}


def quadratic(base: Model) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """A cheap loss with its lowest point a little away from the base."""
    goal = {n: t.double() + 0.1 for n, t in base.items() if t.is_floating_point()}
    return lambda params: sum(((p.double() - goal[n]) ** 2).sum() for n, p in params.items())  # type: ignore[return-value]


def samples_of(base: Model, count: int) -> mergeway.Objective:
    """Samples for each arrival, to be run through the linear layers of a model of plain tensors."""
    network = Layers({n: tuple(t.shape) for n, t in base.items() if is_linear(n, tuple(t.shape), None)})
    generator = torch.Generator().manual_seed(7)
    tasks = []
    for k in range(count):
        x = torch.randn(6, network.width, generator=generator)
        tasks.append(mergeway.Samples(f"task{k}", {"x": x}, torch.arange(6) % 2, torch.eye(2)))
    return mergeway.Objective(network, tasks)


class Layers(Network):
    """Linear layers side by side, each of which reads the beginning of the same row."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self.module, self.compute = nn.Module(), mergeway.Compute("cpu")
        for name, (out, into) in ((n, s) for n, s in shapes.items() if len(s) == 2):
            self.module.add_module(name.removesuffix(".weight"), nn.Linear(into, out, bias=False))
        self.width = max((layer.in_features for layer in self.module.children()), default=1)

    def __call__(self, params: Mapping[str, Tensor], inputs: Mapping[str, Any], head: Any) -> Tensor:
        sums = [torch.zeros(len(inputs["x"]))]
        for name, layer in self.module.named_children():
            own = {"weight": params[f"{name}.weight"]}
            sums.append(functional_call(layer, own, inputs["x"][:, : layer.in_features]).sum(1))
        total = torch.stack(sums).sum(0)
        return torch.stack([total, -total], 1)


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
