"""RandMix (Holistic CMM): each entry is taken from one arrival at random, kept fair by reservoir sampling."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from mergeway.core.tensors import Part
from mergeway.rules.rule import Fold, PartRule, State


@dataclass(frozen=True)
class Randmix(PartRule):
    """The k-th arrival replaces an entry with probability η_k, so that arrival i holds w_i/W_k of the entries at any time."""

    name = "randmix"
    title = "each entry from a random arrival, reservoir-sampled"
    paper = "Holistic CMM, baseline RandMix"
    slots = ("mix",)

    scaling: float = 1.0
    seed: int = 0

    def fold(self, at: Fold, part: Part, delta: Tensor, state: State) -> State:
        take = torch.rand(delta.shape, generator=self._generator(at, part)).to(delta.device) < at.eta
        return {"mix": torch.where(take, delta, state["mix"])}

    def update(self, at: Fold, part: Part, state: State) -> Tensor:
        return self.scaling * state["mix"]

    def _generator(self, at: Fold, part: Part) -> torch.Generator:
        """Its own stream of numbers for each step and part, so that neither order nor threads change the result."""
        key = hashlib.sha256(f"{self.seed}:{at.step}:{part.name}:{part.start}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
