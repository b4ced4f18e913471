"""The loss of a batch: cross-entropy of labels, or KL from the arrival's answers; of classes, or of next tokens."""

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
_LEAST_REST = 1e-6


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


def divergence(logits: Tensor, answers: Tensor, temperature: float = 1.0, own: Tensor | None = None) -> Tensor:
    """T²·KL(p ‖ q) of every row at temperature T, p from the arrival's logits and q from the model's.

    A sure arrival says little beside its likeliest class; divided by T its logits say how the others compare. The factor T² keeps
    the gradient's size. With `own`, p is nothing but these classes: −log q(own) + T²·KL(p ‖ q given own), by the chain rule.
    """
    if logits.shape[-1] != answers.shape[-1]:
        raise OptionError(
            f"the arrival answered for {answers.shape[-1]} classes, but the head has {logits.shape[-1]}; a task keeps the head it came with"
        )
    answers, logits = answers.to(logits.device).float(), logits.float()
    elsewhere: Tensor | float = 0.0
    if own is not None:
        own = own.to(logits.device)
        elsewhere = logits.logsumexp(-1) - logits[..., own].logsumexp(-1)
        answers, logits = answers[..., own], logits[..., own]
    log_p = (answers / temperature).log_softmax(-1)
    log_q = (logits / temperature).log_softmax(-1)
    return elsewhere + temperature**2 * (log_p.exp() * (log_p - log_q)).sum(-1)


def top_divergence(logits: Tensor, answers: Tensor, tops: Tensor) -> Tensor:
    """KL(p ‖ q) from part of p: the arrival's likeliest tokens, and the mass of all others, the last of `answers`.

    That mass r is spread evenly over the m tokens that were drawn from the others by their chance, −1 − token in `tops`:
    Σ p log(p/q) over the likeliest + r/m·Σ log(p/q) over the drawn, which in the mean over draws is KL over the whole
    vocabulary. Where none was drawn the others are one bin.
    """
    if answers.shape[-1] != tops.shape[-1] + 1:
        raise OptionError(f"answers of {answers.shape[-1]} bins for {tops.shape[-1]} tokens; it must be one bin more")
    tops, logits = tops.to(logits.device).long(), logits.float()
    drawn = tops < 0
    tokens = torch.where(drawn, -1 - tops, tops)
    if tokens.numel() and int(tokens.max()) >= logits.shape[-1]:
        raise OptionError(
            f"the arrival answered with token {int(tokens.max())}, but the model has {logits.shape[-1]}; the answers are of another vocabulary"
        )
    log_p = answers.to(logits.device).float()
    # Half precision has rounded them: the likeliest and the rest together are one again.
    log_p = log_p - torch.cat([log_p[..., :-1].masked_fill(drawn, -torch.inf), log_p[..., -1:]], -1).logsumexp(
        -1, keepdim=True
    )
    log_p, log_rest = log_p[..., :-1], log_p[..., -1:]
    log_q = logits.gather(-1, tokens) - logits.logsumexp(-1, keepdim=True)
    if drawn.any():
        share = torch.where(drawn, log_rest.exp() / drawn.sum(-1, keepdim=True).clamp(min=1), log_p.exp())
        return (share * (log_p - log_q)).sum(-1)
    # log(1 − Σq), kept away from log 0, where nothing but rounding is left.
    others = torch.log(-torch.expm1(log_q.logsumexp(-1, keepdim=True).clamp(max=-_LEAST_REST)))
    return (log_p.exp() * (log_p - log_q)).sum(-1) + (log_rest.exp() * (log_rest - others)).sum(-1)


def judged(samples: Samples) -> Tensor:
    """Which places of tokens have a next one that is judged, [rows, places − 1]."""
    return samples.labels[:, 1:] != MASKED


def total_loss(logits: Tensor, rows: Samples, temperature: float = 1.0) -> Tensor:
    """The loss summed over all that is judged: KL from the arrival's answers where there are any, else cross-entropy.

    Only answers about classes have a temperature: of tokens an arrival names a part, and which part is of its own temperature.
    """
    if rows.answers is None:
        return cross_entropy(logits, rows.labels) * targets(rows)
    answers, tops = rows.answers[:, 0], None if rows.tops is None else rows.tops[:, 0]
    if rows.documents:
        here = judged(rows)
        logits, answers = logits[:, :-1][here.to(logits.device)], answers[:, :-1][here]
        tops = None if tops is None else tops[:, :-1][here]
    if tops is None:
        return divergence(logits, answers, temperature, rows.own).sum()
    return top_divergence(logits, answers, tops).sum()


def mean_loss(logits: Tensor, rows: Samples, temperature: float = 1.0) -> Tensor:
    """The same, its mean."""
    if rows.answers is None:
        return cross_entropy(logits, rows.labels)
    return total_loss(logits, rows, temperature) / max(1, targets(rows))


def targets(samples: Samples) -> int:
    """How many predictions are judged: one a sample, or one for every next token that is not masked."""
    return int(judged(samples).sum()) if samples.documents else len(samples)
