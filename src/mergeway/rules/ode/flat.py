"""The moving parameters of a merge as flat buffers: where we are, where we go, and the gradient, with views as parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mergeway.core.ranks import team
from mergeway.core.tensors import wide
from mergeway.errors import MergewayError, OptionError

# A loss over named tensors; autograd gives its gradient.
Loss = Callable[[Mapping[str, Tensor]], Tensor]

_CHUNK = 1 << 20


class FlatParams:
    """θ, θ1 and g in one contiguous buffer each; a parameter that does not move is frozen and gets no gradient.

    `params` are views of θ and their `.grad` are views of g, so a step is one call over the buffer and a backward pass fills
    g in place. `spare` is the third and last vector beyond the model, made when a solver asks for it; only the diagonal
    metric needs one more, `moments`.
    """

    def __init__(self, start: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
        if start.keys() != target.keys():
            odd = sorted(start.keys() ^ target.keys())[0]
            raise OptionError(f"start and target do not have the same parameters: '{odd}' is only in one of them")
        for name in start:
            if start[name].shape != target[name].shape:
                raise OptionError(
                    f"'{name}' has shape {list(start[name].shape)} at the start and {list(target[name].shape)} at the target"
                )
        floats = [n for n in start if start[n].is_floating_point()]
        dtype = torch.float64 if any(wide(start[n].dtype) is torch.float64 for n in floats) else torch.float32
        mine = {n for n in floats if not torch.equal(start[n], target[n])}
        moved = set().union(*team().gather(mine))  # each rank sees its own rows only
        self.moving = [n for n in floats if n in moved]
        self._shapes = {n: start[n].shape for n in self.moving}
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
            span = slice(offset, offset + start[name].numel())
            self.theta[span] = start[name].detach().reshape(-1)
            self.target[span] = target[name].detach().reshape(-1)
            view = self.theta[span].view(start[name].shape).detach().requires_grad_()
            view.grad = self.grad[span].view(start[name].shape)
            self.params[name], self.spans[name] = view, span
            offset = span.stop

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

    def gradient(self, loss: Loss) -> float:
        """L(θ), with ∇L left in `grad`; an objective that adds up its own micro-batches does so in place."""
        self.grad.zero_()
        accumulate: Any = getattr(loss, "accumulate", None)
        if accumulate is not None:
            return float(accumulate(self.params))
        value = self._scalar(loss(self.params))
        if value.requires_grad:
            value.backward()
        return float(value.detach())

    def value(self, loss: Loss) -> float:
        """L(θ) alone."""
        with torch.no_grad():
            return float(self._scalar(loss(self.params)))

    def value_at_target(self, loss: Loss) -> float:
        """L(θ1)."""
        return self.at_target(lambda: self.value(loss))

    def at_target(self, look: Callable[[], Any]) -> Any:
        """What `look` sees at θ1; the buffers are swapped block by block, so that no further vector is needed."""
        self._swap()
        try:
            return look()
        finally:
            self._swap()

    def _swap(self) -> None:
        for i in range(0, self.theta.numel(), _CHUNK):
            part = slice(i, i + _CHUNK)
            kept = self.theta[part].clone()
            self.theta[part] = self.target[part]
            self.target[part] = kept

    @staticmethod
    def _scalar(value: Any) -> Tensor:
        if not isinstance(value, Tensor) or value.numel() != 1:
            what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise MergewayError(f"the objective returned {what}; it must return one number as a tensor")
        return value.reshape(())

    def move(self, along: float, across: float) -> None:
        """θ ← θ + along·(θ1 − θ) + across·d, d being what is in `grad`: a lerp and an axpy."""
        self.theta.lerp_(self.target, along)
        if across:
            self.theta.add_(self.grad, alpha=across)

    def velocity_into(self, out: Tensor, along: float, across: float) -> Tensor:
        """out ← along·(θ1 − θ) + across·d; `out` may be `grad` itself."""
        if out is self.grad:
            out.mul_(across).add_(self.target, alpha=along).add_(self.theta, alpha=-along)
        else:
            torch.sub(self.target, self.theta, out=out).mul_(along).add_(self.grad, alpha=across)
        return out

    def tensors(self) -> dict[str, Tensor]:
        """A copy of θ as named tensors."""
        return {n: (self.params[n].detach().clone() if n in self.spans else p) for n, p in self.params.items()}

    def release(self) -> dict[str, Tensor]:
        """θ itself as named tensors, for when the walk is over: no further vector is needed."""
        return {n: p.detach() for n, p in self.params.items()}


def products(*pairs: tuple[Tensor, Tensor]) -> list[float]:
    """Inner products accumulated in float64, a chunk at a time; a pair of a tensor with itself is its squared norm."""
    totals = [0.0] * len(pairs)
    for i in range(0, pairs[0][0].numel(), _CHUNK):
        part = slice(i, i + _CHUNK)
        for k, (a, b) in enumerate(pairs):
            x = a[part].double()
            totals[k] += float(x @ (x if a is b else b[part].double()))
    return team().add_up(totals)


def gap_products(flat: FlatParams, d: Tensor) -> tuple[float, float]:
    """⟨θ1 − θ, d⟩ and ‖θ1 − θ‖², the difference taken in float64 so that near targets lose nothing."""
    cross = length = 0.0
    for i in range(0, flat.theta.numel(), _CHUNK):
        part = slice(i, i + _CHUNK)
        r = flat.target[part].double() - flat.theta[part].double()
        cross += float(r @ d[part].double())
        length += float(r @ r)
    cross, length = team().add_up([cross, length])
    return cross, length
