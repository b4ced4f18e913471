"""What an arrival's own data says about it: the diagonal of its Fisher information, and the Gram matrices of its layers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mergeway.calibration import Samples
from mergeway.compute import compute_of
from mergeway.errors import OptionError
from mergeway.naming import Names
from mergeway.objective import Predict, cross_entropy

Params = Mapping[str, Tensor]


def fisher_diagonal(predict: Predict, params: Params, samples: Samples) -> dict[str, Tensor]:
    """The empirical Fisher's diagonal: the mean over samples of the squared gradient of each sample's own loss."""
    compute = compute_of(predict)
    wide = {n: p.detach().float() for n, p in params.items() if p.is_floating_point()}
    leaves = {n: p.requires_grad_() for n, p in compute.put(wide).items()}
    squares = {n: torch.zeros_like(p, requires_grad=False) for n, p in leaves.items()}
    for i in range(len(samples)):
        row = samples.rows(slice(i, i + 1))
        loss = cross_entropy(predict(leaves, row.inputs, row.head), row.labels)
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        for square, gradient in zip(squares.values(), gradients, strict=True):
            if gradient is not None:
                square.addcmul_(gradient, gradient, value=1 / len(samples))
    return {n: square.cpu() for n, square in squares.items()}


def gram_matrices(predict: Any, params: Params, samples: Samples) -> dict[str, Tensor]:
    """XᵀX/n of the inputs of every linear layer, by the name of the layer's weight."""
    model = getattr(predict, "model", None)
    if not isinstance(model, nn.Module):
        raise OptionError("Gram matrices are taken from a model's layers; give the task's data, not a function")
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def listen(name: str) -> Callable[..., None]:
        def hear(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            rows = inputs[0].reshape(-1, inputs[0].shape[-1])
            rows = (rows.cpu() if rows.device.type == "mps" else rows).double()  # which has no float64
            sums[name] = sums.get(name, 0) + rows.mT @ rows
            counts[name] = counts.get(name, 0) + len(rows)

        return hear

    stored = Names(model).stored
    linear = [(stored(f"{n}.weight"), m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    handles = [m.register_forward_pre_hook(listen(n)) for n, m in linear]
    compute = compute_of(predict)
    batch = compute.micro_batch or 64
    wide = compute.put({n: p.float() if p.is_floating_point() else p for n, p in params.items()})
    try:
        with torch.no_grad(), predict.run.uncompiled() if hasattr(predict, "run") else contextlib.nullcontext():
            for start in range(0, len(samples), batch):
                rows = samples.rows(slice(start, start + batch))
                predict(wide, rows.inputs, rows.head)
    finally:
        for handle in handles:
            handle.remove()
    return {name: (total / counts[name]).float().cpu() for name, total in sums.items()}
