"""The loss of a batch: cross-entropy of classes, or of next tokens, and how many predictions it is the mean of."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from mergeway.calibration.samples import MASKED, UNKNOWN, Samples
from mergeway.errors import OptionError
from mergeway.model.inputs import Head, Inputs, Params

# Logits of a batch: predict(params, inputs, head); what a head is depends on the kind of model.
Predict = Callable[[Params, Inputs, Head], Tensor]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean loss of classes, or of every next token that is not masked, where the logits are."""
    if labels.ndim == 1 and bool((labels == UNKNOWN).any()):
        raise OptionError("the samples have no labels, and no arrival has answered for them; give labelled data")
    labels = labels.to(logits.device)
    if logits.dtype is torch.bfloat16:  # what autocast leaves behind
        logits = logits.float()
    if labels.ndim == 1:
        return functional.cross_entropy(logits, labels)
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def divergence(logits: Tensor, answers: Tensor, mask: Tensor | None = None) -> Tensor:
    """KL(p ‖ q) of every row, p from the arrival's logits and q from the model's; of tokens, the mean over those in the mask."""
    if logits.shape[-1] != answers.shape[-1]:
        raise OptionError(
            f"the arrival answered for {answers.shape[-1]} classes, but the head has {logits.shape[-1]}; a task keeps the head it came with"
        )
    logits, answers = logits.float(), answers.to(logits.device).float()
    log_p = answers.log_softmax(-1)
    found = (log_p.exp() * (log_p - logits.log_softmax(-1))).sum(-1)
    if found.ndim == 1 or mask is None:
        return found
    keep = mask.to(found)
    return (found * keep).sum(-1) / keep.sum(-1)


def targets(samples: Samples) -> int:
    """How many predictions are judged: one a sample, or one for every next token that is not masked."""
    return len(samples) if samples.labels.ndim == 1 else int((samples.labels[:, 1:] != MASKED).sum())
