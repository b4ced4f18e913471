"""What an arrival's own data says about it: the diagonal of its Fisher information, and the Gram matrices of its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from mergeway.calibration.loss import Predict, cross_entropy
from mergeway.calibration.samples import Samples, require_labels
from mergeway.checkpoint.naming import Names
from mergeway.errors import OptionError
from mergeway.model.compute import compute_of
from mergeway.model.inputs import Params
from mergeway.model.model import Network


def fisher_diagonal(predict: Predict, params: Params, samples: Samples) -> dict[str, Tensor]:
    """The empirical Fisher's diagonal: the mean over samples of the squared gradient of each sample's own loss."""
    require_labels(samples, "an empirical Fisher needs them where there are no --moments")
    return _mean_squares(predict, params, samples, 1, predicted=False)


def fisher_of_batches(predict: Predict, params: Params, samples: Samples, batch: int) -> dict[str, Tensor]:
    """The mean over batches of the squared gradient of a batch's mean loss, by the labels that the model itself predicts."""
    return _mean_squares(predict, params, samples, batch, predicted=True)


def _mean_squares(
    predict: Predict, params: Params, samples: Samples, size: int, *, predicted: bool
) -> dict[str, Tensor]:
    compute = compute_of(predict)
    wide = {n: p.detach().float() for n, p in params.items() if p.is_floating_point()}
    leaves = {n: p.requires_grad_() for n, p in compute.put(wide).items()}
    squares = {n: torch.zeros_like(p, requires_grad=False) for n, p in leaves.items()}
    starts = range(0, len(samples), size)
    for i in starts:
        rows = samples.rows(slice(i, i + size)).trimmed()
        logits = predict(leaves, rows.inputs, rows.head)
        loss = cross_entropy(logits, logits.detach().argmax(-1) if predicted else rows.labels)
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        gradients = cast("Sequence[Tensor | None]", found)
        for square, gradient in zip(squares.values(), gradients, strict=True):
            if gradient is not None:
                square.addcmul_(gradient, gradient, value=1 / len(starts))
    return {n: square.cpu() for n, square in squares.items()}


def gram_matrices(predict: Predict, params: Params, samples: Samples) -> dict[str, Tensor]:
    """XᵀX/n of the inputs of every linear layer, by the name of the layer's weight; padding is no input."""
    if not isinstance(predict, Network):
        raise OptionError("Gram matrices are taken from a model's layers; give the task's data, not a function")
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    mask: Tensor | None = None

    def listen(name: str) -> Callable[..., None]:
        def hear(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0]
            padded = mask is not None and x.shape[:-1] == mask.shape
            rows = x[mask] if padded else x.reshape(-1, x.shape[-1])
            gram = rows.mT @ rows
            # A batch in its own precision, their sum in float64, which not every device has.
            sums[name] = sums.get(name, 0) + gram.cpu().double()
            counts[name] = counts.get(name, 0) + len(rows)

        return hear

    stored = Names(predict.module).stored
    modules = cast("Iterable[tuple[str, nn.Module]]", predict.module.named_modules())
    linear = [(stored(f"{n}.weight"), m) for n, m in modules if isinstance(m, nn.Linear)]
    handles = [m.register_forward_pre_hook(listen(n)) for n, m in linear]
    compute = predict.compute
    batch = compute.micro_batch or 64
    samples = samples.by_length()
    wide = compute.put({n: p.float() if p.is_floating_point() else p for n, p in params.items()})
    try:
        with torch.no_grad(), predict.run.uncompiled():
            for start in range(0, len(samples), batch):
                rows = samples.rows(slice(start, start + batch)).trimmed()
                mask = None if rows.mask is None else rows.mask.bool()
                predict(wide, rows.inputs, rows.head)
    finally:
        for handle in handles:
            handle.remove()
    return {name: (total / counts[name]).float() for name, total in sums.items()}
