"""The directions in which a sum of updates can be scaled: the singular vectors of each matrix, under one common length."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mergeway.core.linalg import thin_svd
from mergeway.core.ranks import ALONE, Team

Params = dict[str, Tensor]


@dataclass(frozen=True)
class Directions:
    """U, Vᵀ and the length of each direction u_i v_iᵀ of every matrix; any other tensor is one direction of its own.

    Tensors that are zero have none. A model moves by Σ_i c_i·length_i·u_i v_iᵀ, where the gains c are what is searched for.
    Vectors of a float32 model are kept in bfloat16: what they lack in digits the weights beside them can learn. Each rank of `team`
    has its rows of a tensor and of U, and all of V, lengths and gains.
    """

    left: Params
    right: Mapping[str, Tensor | None]
    lengths: Params
    # The lengths with which all gains of 1 give the mean of the updates.
    own: Params
    team: Team = ALONE

    @classmethod
    def of_sum(
        cls,
        total: Iterable[tuple[str, Tensor]],
        k: int,
        sees_matrix: Callable[[str, tuple[int, ...]], bool],
        team: Team = ALONE,
    ) -> Directions:
        """Those of S, the sum of k updates, with a flat spectrum: σ̄ for every direction of a matrix, S/k for anything else."""
        left: Params = {}
        right: dict[str, Tensor | None] = {}
        lengths: Params = {}
        own: Params = {}
        for name, s in total:
            if not any(team.gather(bool(s.any()))):
                continue
            if sees_matrix(name, whole_shape(s, team)):
                left[name], sigma, right[name] = _decomposed(s.reshape(len(s), math.prod(s.shape[1:])), team)
                lengths[name], own[name] = sigma.mean().expand(len(sigma)).to(s.dtype), (sigma / k).to(s.dtype)
            else:
                left[name], right[name] = _kept(s / k, s.dtype), None
                lengths[name] = own[name] = torch.ones(1, dtype=s.dtype)
        return cls(left, right, lengths, own, team)

    def of_mean(self) -> Directions:
        """The same directions with the spectrum of the mean, S/k."""
        return replace(self, lengths=self.own)

    @property
    def names(self) -> list[str]:
        return list(self.left)

    @property
    def matrices(self) -> set[str]:
        """The tensors that have singular vectors."""
        return {n for n, vt in self.right.items() if vt is not None}

    def gains(self, c: float) -> Params:
        """The same gain for every direction."""
        return {n: torch.full_like(length, c) for n, length in self.lengths.items()}

    def added(self, ground: Params, gains: Params) -> Params:
        """ground + U diag(c·length) Vᵀ."""
        moved = dict(ground)
        with torch.no_grad():
            for name, c in gains.items():
                moved[name] = self._update(name, c).reshape(ground[name].shape).add_(ground[name])
        return moved

    def add_to(self, params: Params, gains: Params) -> Params:
        """The same, in place."""
        with torch.no_grad():
            for name, c in gains.items():
                params[name] += self._update(name, c).reshape(params[name].shape)
        return params

    def of_gains(self, gradients: Params) -> Params:
        """The gradient with respect to the gains, from that of the tensors."""
        # All are there before the first is worked out: among what that takes they would leave holes.
        found = {name: torch.empty_like(self.lengths[name]) for name in gradients}
        for name, g in gradients.items():
            u, vt = self._vectors(name, g.dtype)
            along = (g * u).sum().reshape(1) if vt is None else ((u.mT @ g.reshape(len(u), vt.shape[1])) * vt).sum(1)
            torch.mul(along, self.lengths[name], out=found[name])
        if self.team.count > 1 and found:  # each rank has found what its rows say
            together = torch.cat([*found.values()])
            self.team.add_in_place(together)
            ends = itertools.accumulate(len(t) for t in found.values())
            found = {
                n: together[end - len(t) : end].to(t.dtype) for (n, t), end in zip(found.items(), ends, strict=True)
            }
        return found

    def _update(self, name: str, c: Tensor) -> Tensor:
        u, vt = self._vectors(name, c.dtype)
        c = c * self.lengths[name]
        return c * u if vt is None else (u * c) @ vt

    def _vectors(self, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        vt = self.right[name]
        return self.left[name].to(dtype), None if vt is None else vt.to(dtype)


def whole_shape(rows: Tensor, team: Team) -> tuple[int, ...]:
    """The shape of a tensor of which each rank has its rows."""
    return (sum(team.gather(len(rows))), *rows.shape[1:]) if team.count > 1 else tuple(rows.shape)


def _decomposed(rows: Tensor, team: Team) -> tuple[Tensor, Tensor, Tensor]:
    """U, σ and Vᵀ of a matrix of which each rank has its rows: its rows of U. The lead decomposes, so all have the same bits."""
    whole, own = rows, slice(None)
    if team.count > 1:
        counts = team.gather(len(rows))
        own = slice(sum(counts[: team.rank]), sum(counts[: team.rank + 1]))
        whole = rows.new_zeros(sum(counts), rows.shape[1])
        whole[own] = rows
        team.add_in_place(whole)

    def decompose() -> tuple[Tensor, Tensor, Tensor]:
        u, sigma, v = thin_svd(whole)
        return _kept(u, rows.dtype), sigma, _kept(v.mT, rows.dtype)

    u, sigma, vt = team.from_lead(decompose)
    return u[own].clone() if team.count > 1 else u, sigma, vt


def _kept(vectors: Tensor, dtype: torch.dtype) -> Tensor:
    return vectors.to(torch.bfloat16 if dtype == torch.float32 else dtype)
