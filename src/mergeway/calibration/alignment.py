"""Representation alignment: bring the merged model's features back to those of the model before the merge (Algorithm 1)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn import functional

from mergeway.calibration.loss import Predict
from mergeway.calibration.samples import Samples
from mergeway.core.progress import SILENT, Progress
from mergeway.errors import OptionError
from mergeway.model.inputs import Params
from mergeway.model.model import Encoder
from mergeway.model.tangent import Tangent


@dataclass(frozen=True)
class Alignment:
    """How to align: which parameters move, by default the last projection, and what distance they bring down."""

    module: str | None = None
    distance: Literal["mse", "l1"] = "mse"
    epochs: int = 1
    lr: float = 1e-4
    batch: int = 128
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.distance not in ("mse", "l1"):
            raise OptionError(f"--distance is '{self.distance}'; it must be mse or l1")
        for name in ("epochs", "batch"):
            if getattr(self, name) < 1:
                raise OptionError(f"--{name} is {getattr(self, name)}; it must be at least 1")
        if not (self.lr >= 0 and math.isfinite(self.lr)):
            raise OptionError(f"--lr is {self.lr}; it must be at least 0 and finite")
        if not self.clip > 0:
            raise OptionError(f"--clip is {self.clip}; it must be positive")


@dataclass(frozen=True)
class Aligned:
    """The parameters that moved, and the bias d_t = ‖Z_t − Z_{t−1}‖/|D_t| before and after."""

    moved: dict[str, Tensor]
    before: float
    after: float


def align(
    model: Predict | Tangent,
    merged: Params,
    previous: Params,
    samples: Samples,
    how: Alignment,
    progress: Progress = SILENT,
) -> Aligned:
    """Train the chosen parameters of the merged model until its features on these samples are nearer to the previous model's."""
    if not isinstance(model, Encoder | Tangent):
        raise OptionError("alignment is for models with features: a CLIP vision tower or a text encoder")
    compute = model.compute
    size = compute.micro_batch or how.batch
    params = compute.put({n: t.float() for n, t in merged.items() if t.is_floating_point()})
    old = compute.put({n: t.float() for n, t in previous.items() if t.is_floating_point()})
    names = _chosen(params, how.module)
    for name in names:
        params[name] = params[name].clone().requires_grad_()
    goal = _features(model, old, samples, size)
    before = _bias(_features(model, params, samples, size), goal)
    optimiser: torch.optim.Optimizer = torch.optim.AdamW([params[n] for n in names], lr=how.lr, weight_decay=0.0)
    measure = functional.mse_loss if how.distance == "mse" else functional.l1_loss
    progress.begin("aligning", how.epochs * len(samples), "samples")
    for epoch in range(how.epochs):
        generator = torch.Generator().manual_seed(1_000_003 * how.seed + epoch)
        for rows in torch.split(torch.randperm(len(samples), generator=generator), how.batch):
            optimiser.zero_grad()
            for part in torch.split(rows, size):
                loss = measure(model.embed(params, samples.rows(part).inputs), goal[part])
                torch.autograd.backward(loss * (len(part) / len(rows)))
            torch.nn.utils.clip_grad_norm_([params[n] for n in names], how.clip)
            optimiser.step()  # pyright: ignore[reportUnknownMemberType]
            progress.advance(len(rows))
    moved = {n: params[n].detach().cpu() for n in names}
    return Aligned(moved, before, _bias(_features(model, params, samples, size), goal))


def _chosen(params: Params, module: str | None) -> list[str]:
    """The parameters whose names match; without a pattern those of the last projection."""
    if module is None:
        names = [n for n in params if "projection" in n.rpartition(".")[0].rpartition(".")[2]]
        if not names:
            raise OptionError("the model has no projection as its last layer; name what to train with --module REGEX")
        return names
    try:
        names = [n for n in params if re.search(module, n)]
    except re.error as problem:
        raise OptionError(f"--module {module!r}: not a regular expression ({problem})") from None
    if not names:
        raise OptionError(f"--module {module!r}: no parameter has such a name; there is '{next(iter(params))}'")
    return names


def _features(model: Encoder | Tangent, params: Params, samples: Samples, batch: int) -> Tensor:
    with torch.no_grad():
        parts = [model.embed(params, samples.rows(slice(i, i + batch)).inputs) for i in range(0, len(samples), batch)]
    return torch.cat(parts)


def _bias(features: Tensor, goal: Tensor) -> float:
    distance = cast(Tensor, torch.linalg.vector_norm((features - goal).double()))  # pyright: ignore[reportUnknownMemberType]
    return float(distance) / len(goal)
