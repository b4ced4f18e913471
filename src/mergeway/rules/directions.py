"""The directions in which a sum of updates can be scaled: the singular vectors of each matrix, under one common length."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mergeway.core.linalg import thin_svd

Params = dict[str, Tensor]


@dataclass(frozen=True)
class Directions:
    """σ̄U and Vᵀ of every matrix; any other tensor is one direction of its own. Tensors that are zero have none."""

    left: Params
    right: Mapping[str, Tensor | None]

    @classmethod
    def of_sum(cls, total: Params, k: int, sees_matrix: Callable[[str, tuple[int, ...]], bool]) -> Directions:
        """Those of S, the sum of k updates: flat spectrum for a matrix, S/k for anything else."""
        left: Params = {}
        right: dict[str, Tensor | None] = {}
        for name, s in total.items():
            if not bool(s.any()):
                continue
            if sees_matrix(name, tuple(s.shape)):
                u, sigma, v = thin_svd(s.reshape(len(s), -1))
                left[name], right[name] = (u * sigma.mean()).to(s.dtype), v.mT.to(s.dtype)
            else:
                left[name], right[name] = s / k, None
        return cls(left, right)

    @property
    def names(self) -> list[str]:
        return list(self.left)

    def gains(self, c: float) -> Params:
        """The same gain for every direction."""
        return {
            n: torch.full((1 if vt is None else len(vt),), c, dtype=self.left[n].dtype) for n, vt in self.right.items()
        }

    def added(self, ground: Params, gains: Params) -> Params:
        """ground + σ̄·U diag(c) Vᵀ."""
        moved = dict(ground)
        with torch.no_grad():
            for name, vt in self.right.items():
                u, c = self.left[name], gains[name]
                moved[name] = ground[name] + (c * u if vt is None else ((u * c) @ vt).reshape(ground[name].shape))
        return moved

    def of_gains(self, gradients: Params) -> Params:
        """The gradient with respect to the gains, from that of the tensors."""
        found: Params = {}
        for name, vt in self.right.items():
            u, g = self.left[name], gradients[name]
            found[name] = (g * u).sum().reshape(1) if vt is None else ((u.mT @ g.reshape(len(g), -1)) * vt).sum(1)
        return found
