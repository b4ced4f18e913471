"""What an arrival's own data says about it: the diagonal of its Fisher information, and the Gram matrices of its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from mergeway.calibration import Samples
from mergeway.errors import OptionError
from mergeway.objective import Predict

Params = Mapping[str, Tensor]


def fisher_diagonal(predict: Predict, params: Params, samples: Samples) -> dict[str, Tensor]:
    """The empirical Fisher's diagonal: the mean over samples of the squared gradient of each sample's own loss."""
    leaves = {n: p.detach().float().requires_grad_() for n, p in params.items() if p.is_floating_point()}
    squares = {n: torch.zeros_like(p, requires_grad=False) for n, p in leaves.items()}
    for i in range(len(samples)):
        row = samples.rows(slice(i, i + 1))
        loss = functional.cross_entropy(predict(leaves, row.inputs, row.head), row.labels)
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        for square, gradient in zip(squares.values(), gradients, strict=True):
            if gradient is not None:
                square.addcmul_(gradient, gradient, value=1 / len(samples))
    return squares


def gram_matrices(predict: Any, params: Params, samples: Samples, batch: int = 64) -> dict[str, Tensor]:
    """XᵀX/n of the inputs of every linear layer, by the name of the layer's weight."""
    model = getattr(predict, "model", None)
    if not isinstance(model, nn.Module):
        raise OptionError("Gram matrices are taken from a model's layers; give the task's data, not a function")
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def listen(name: str) -> Callable[..., None]:
        def hear(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            rows = inputs[0].reshape(-1, inputs[0].shape[-1]).double()
            sums[name] = sums.get(name, 0) + rows.mT @ rows
            counts[name] = counts.get(name, 0) + len(rows)

        return hear

    linear = [(f"{n}.weight", m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    handles = [m.register_forward_pre_hook(listen(n)) for n, m in linear]
    wide = {n: p.float() if p.is_floating_point() else p for n, p in params.items()}
    try:
        with torch.no_grad():
            for start in range(0, len(samples), batch):
                rows = samples.rows(slice(start, start + batch))
                predict(wide, rows.inputs, rows.head)
    finally:
        for handle in handles:
            handle.remove()
    return {name: (total / counts[name]).float() for name, total in sums.items()}
