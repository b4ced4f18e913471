"""The moving parameters of a merge as flat buffers: where we are, where we go, and the gradient, with views as parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from mergeway.calibration.objective import Objective
from mergeway.core.ranks import ALONE, Team
from mergeway.core.tensors import wide
from mergeway.errors import OptionError

T = TypeVar("T")

CHUNK = 1 << 20  # entries that are widened to float64 at a time


class FlatParams:
    """θ, θ1 and g in one contiguous buffer each; a parameter that does not move is frozen and gets no gradient.

    `params` are views of θ and their `.grad` are views of g, so a step is one call over the buffer and a backward pass fills
    g in place. `spare` is the third and last vector beyond the model, allocated when a solver asks for it; only the diagonal
    metric needs one more, `moments`. Every rank of `team` holds its own rows; norms and inner products are over all of them.
    """

    def __init__(self, start: Mapping[str, Tensor], target: Mapping[str, Tensor], team: Team = ALONE) -> None:
        _check_fit(start, target)
        self.team = team
        floats = [n for n in start if start[n].is_floating_point()]
        dtype = torch.float64 if any(wide(start[n].dtype) is torch.float64 for n in floats) else torch.float32
        mine = {n for n in floats if not torch.equal(start[n], target[n])}
        moved = {n for names in team.gather(mine) for n in names}  # each rank sees its own rows only
        self.moving = [n for n in floats if n in moved]
        size = sum(start[n].numel() for n in self.moving)
        self.theta = torch.empty(size, dtype=dtype)
        self.target = torch.empty(size, dtype=dtype)
        self.grad = torch.zeros(size, dtype=dtype)
        self._spare: Tensor | None = None
        self._moments: Tensor | None = None
        self.spans: dict[str, slice] = {}
        self.params: dict[str, Tensor] = {n: start[n].detach() for n in start}
        offset = 0
        for name in self.moving:
            end = offset + start[name].numel()
            span = slice(offset, end)
            self.theta[span] = start[name].detach().reshape(-1)
            self.target[span] = target[name].detach().reshape(-1)
            view = self.theta[span].view(start[name].shape).detach().requires_grad_()
            view.grad = self.grad[span].view(start[name].shape)
            self.params[name], self.spans[name] = view, span
            offset = end

    @property
    def spare(self) -> Tensor:
        if self._spare is None:
            self._spare = torch.empty_like(self.theta)
        return self._spare

    @property
    def moments(self) -> Tensor:
        if self._moments is None:
            self._moments = torch.empty_like(self.theta)
        return self._moments

    def gradient(self, loss: Objective) -> float:
        """L(θ), with ∇L left in `grad`."""
        self.grad.zero_()
        return float(loss.accumulate(self.params))

    def value(self, loss: Objective) -> float:
        """L(θ) alone."""
        with torch.no_grad():
            return float(loss(self.params))

    def at_target(self, look: Callable[[], T]) -> T:
        """What `look` sees at θ1; the buffers are swapped block by block, so that no further vector is needed."""
        self._swap()
        try:
            return look()
        finally:
            self._swap()

    def _swap(self) -> None:
        for part in chunks(self.theta):
            kept = self.theta[part].clone()
            self.theta[part] = self.target[part]
            self.target[part] = kept

    def move(self, to_target: float, to_gradient: float) -> None:
        """θ ← θ + to_target·(θ1 − θ) + to_gradient·d, d being what is in `grad`: a lerp and an axpy."""
        self.theta.lerp_(self.target, to_target)
        if to_gradient:
            self.theta.add_(self.grad, alpha=to_gradient)

    def velocity_into(self, out: Tensor, to_target: float, to_gradient: float) -> Tensor:
        """out ← to_target·(θ1 − θ) + to_gradient·d; `out` may be `grad` itself."""
        if out is self.grad:
            out.mul_(to_gradient).add_(self.target, alpha=to_target).add_(self.theta, alpha=-to_target)
        else:
            torch.sub(self.target, self.theta, out=out).mul_(to_target).add_(self.grad, alpha=to_gradient)
        return out

    def square(self, x: Tensor) -> float:
        """‖x‖² over all ranks."""
        return inner(x, x, self.team)

    def gap_products(self, d: Tensor) -> tuple[float, float]:
        """⟨θ1 − θ, d⟩ and ‖θ1 − θ‖², the difference taken in float64 so that near targets lose nothing."""
        cross = length = 0.0
        for part in chunks(self.theta):
            r = self.target[part].double() - self.theta[part].double()
            cross += float(r @ d[part].double())
            length += float(r @ r)
        cross, length = self.team.add_up([cross, length])
        return cross, length

    def tensors(self) -> dict[str, Tensor]:
        """A copy of θ as named tensors."""
        return {n: (self.params[n].detach().clone() if n in self.spans else p) for n, p in self.params.items()}

    def release(self) -> dict[str, Tensor]:
        """θ itself as named tensors, for when the path is at its end: no further vector is needed."""
        return {n: p.detach() for n, p in self.params.items()}


def chunks(x: Tensor) -> Iterator[slice]:
    """Slices of a flat buffer."""
    return (slice(i, i + CHUNK) for i in range(0, x.numel(), CHUNK))


def inner(a: Tensor, b: Tensor, team: Team = ALONE) -> float:
    """⟨a, b⟩ over all ranks, accumulated in float64 a chunk at a time."""
    total = 0.0
    for part in chunks(a):
        x = a[part].double()
        total += float(x @ (x if a is b else b[part].double()))
    return team.add_up([total])[0]


def _check_fit(start: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    if start.keys() != target.keys():
        odd = sorted(start.keys() ^ target.keys())[0]
        raise OptionError(f"start and target do not have the same parameters: '{odd}' is only in one of them")
    for name in start:
        if start[name].shape != target[name].shape:
            raise OptionError(
                f"'{name}' has shape {list(start[name].shape)} at the start and {list(target[name].shape)} at the target"
            )
