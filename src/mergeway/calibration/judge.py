"""Judging a model on data: loss and accuracy of classes and next tokens, exact match of completions, choices.

Whoever needs a figure asks here: `evaluate`, the gate of `add`, and the suites of `bench`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from mergeway.calibration.documents import padded
from mergeway.calibration.loss import Predict, targets
from mergeway.calibration.questions import Asked, Choice, Question, plain
from mergeway.calibration.samples import MASKED, Samples, read_ahead, require_labels
from mergeway.model.compute import compute_of
from mergeway.model.generation import complete
from mergeway.model.inputs import Params
from mergeway.model.kinds import CausalLM

_AT_ONCE, _TEXTS_AT_ONCE = 32, 8  # a text has as many logits as words are known, at every place


@dataclass(frozen=True)
class Score:
    """What a model is worth on a task's data. `accuracy`, `exact` and `choices` are in percent; None where nothing asks for them.

    `accuracy` and `loss` are those of the labels, or of every next token that is not masked; of tokens there is a `perplexity`.
    """

    samples: int
    accuracy: float
    loss: float
    perplexity: float | None = None
    exact: float | None = None
    choices: float | None = None

    @property
    def measure(self) -> str:
        """The name of the figure that says most: choices before exact match before accuracy."""
        return next(name for name in ("choices", "exact", "accuracy") if getattr(self, name) is not None)

    @property
    def value(self) -> float:
        """That figure, in percent."""
        return float(getattr(self, self.measure))


def judge(model: Predict, params: Params, samples: Samples, asked: Asked | None = None) -> Score:
    """Everything that can be measured of a model with these parameters on a task's samples and questions."""
    params = in_full(model, params)
    loss, accuracy = judge_samples(model, params, samples)
    tokens = samples.labels.ndim > 1
    asked = asked if asked is not None and isinstance(model, CausalLM) else Asked()
    return Score(
        len(samples),
        accuracy,
        loss,
        math.exp(min(loss, 700.0)) if tokens else None,
        exact_match(model, params, asked.questions) if isinstance(model, CausalLM) and asked.questions else None,
        choice_accuracy(model, params, asked.choices) if asked.choices else None,
    )


def in_full(model: Predict, params: Params) -> dict[str, Tensor]:
    """Parameters where the model is run; half precision is computed with in float32."""
    return compute_of(model).put({n: p.float() if p.is_floating_point() else p for n, p in params.items()})


@torch.no_grad()
def judge_samples(
    model: Predict, params: Params, samples: Samples, batch: int | None = None, among: Tensor | None = None
) -> tuple[float, float]:
    """The mean loss, and the accuracy in percent, of labels or of next tokens; `among` marks the classes that may be chosen."""
    require_labels(samples, "a model is judged by those of its test data")
    samples, total, size = samples.by_length(), targets(samples), _rows_at_once(model, samples, batch)
    hits, loss = 0, 0.0
    for rows in read_ahead(samples.rows(slice(at, at + size)).trimmed() for at in range(0, len(samples), size)):
        logits, labels = _aligned(model(params, rows.inputs, rows.head), rows.labels)
        if among is not None:
            logits = logits.masked_fill(~among, -torch.inf)
        hits += int((logits.argmax(-1) == labels).sum())
        loss += float(functional.cross_entropy(logits, labels, ignore_index=MASKED, reduction="sum"))
    return loss / total, 100.0 * hits / total


def exact_match(model: CausalLM, params: Params, questions: Sequence[Question]) -> float:
    """The percentage of prompts that the model completes, greedily, with the text that is right; blanks at its ends do not count."""
    found = answers(model, params, questions)
    return 100.0 * sum(q.answer == text for q, text in zip(questions, found, strict=True)) / len(questions)


def answers(model: CausalLM, params: Params, questions: Sequence[Question]) -> list[str]:
    """What the model says to each prompt, in as many tokens as the right answer takes, or fewer where it ends before."""
    order = sorted(range(len(questions)), key=lambda k: (questions[k].tokens, len(questions[k].prompt)))
    size = model.compute.micro_batch or _AT_ONCE
    found: dict[int, str] = {}
    for start in range(0, len(order), size):
        part = order[start : start + size]
        most = max(questions[k].tokens for k in part)
        completions = complete(model, params, [questions[k].prompt for k in part], most)
        found |= {k: plain(model, ids[: questions[k].tokens]) for k, ids in zip(part, completions, strict=True)}
    return [found[k] for k in range(len(questions))]


def choice_accuracy(model: Predict, params: Params, choices: Sequence[Choice]) -> float:
    """The percentage of choices in which the right answer is the likeliest, by the mean log-probability of its tokens."""
    documents = [d for choice in choices for d in choice.documents]
    losses = document_losses(model, params, padded(documents, 0, "choices"))
    hits, start = 0, 0
    for choice in choices:
        own = losses[start : start + len(choice.documents)]
        start += len(choice.documents)
        hits += int(own.argmin()) == choice.right
    return 100.0 * hits / len(choices)


@torch.no_grad()
def document_losses(model: Predict, params: Params, documents: Samples) -> Tensor:
    """The mean loss of the judged tokens of each document."""
    assert documents.mask is not None
    order = documents.mask.sum(-1).argsort(stable=True)
    losses = torch.empty(len(documents))
    size = _rows_at_once(model, documents, None)
    for start in range(0, len(documents), size):
        part = order[start : start + size]
        rows = documents.rows(part).trimmed()
        logits, labels = _aligned(model(params, rows.inputs, rows.head), rows.labels)
        each = functional.cross_entropy(logits, labels, ignore_index=MASKED, reduction="none").view(len(rows), -1)
        losses[part] = (each.sum(-1) / (labels.view(len(rows), -1) != MASKED).sum(-1)).cpu()
    return losses


def _aligned(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Logits beside what they are to say: a row for each label, or for each next token."""
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    labels = labels.to(logits.device)
    return (logits, labels) if labels.ndim == 1 else (logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _rows_at_once(model: Predict, samples: Samples, batch: int | None) -> int:
    return batch or compute_of(model).micro_batch or (_TEXTS_AT_ONCE if samples.labels.ndim > 1 else _AT_ONCE)
