"""Asking an arrival: its own answers to its samples and to their copies, kept in place of labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import log

import torch
from torch import Tensor
from torch.nn import functional

from mergeway.calibration.copies import LABELS, copy_rows, how_copied
from mergeway.calibration.loss import Predict, judged
from mergeway.calibration.samples import Samples
from mergeway.errors import OptionError
from mergeway.model.compute import compute_of
from mergeway.model.inputs import Params

INPUTS = 8192  # samples and copies that a memory is worth in all, unless it is told how many copies
MOST_COPIES = 63
TOP_K = 32  # tokens that an arrival names at every place of a text, unless it is told how many
ASKED_AT_ONCE = 128
FEW = 16  # samples below which answers are not compared with each other
GOLDEN = (5**0.5 - 1) / 2  # its multiples fall evenly between whole numbers
NEVER = -1e4  # the log-probability of what does not happen: half precision has no infinity that a sum can take


def copies_of(size: int, documents: bool = False) -> int:
    """How many copies of each sample make up for a small memory: 7 at 1024 samples, 63 at 128.

    A document needs none: its language model is asked at every token.
    """
    return 0 if documents else min(MOST_COPIES, max(0, INPUTS // size - 1))


def ask(
    predict: Predict, arrival: Params, samples: Samples, copies: int, top_k: int = TOP_K, at_once: int = ASKED_AT_ONCE
) -> Samples:
    """The samples with the arrival's answers, in half precision: logits of classes, or of `top_k` tokens twice."""
    compute = compute_of(predict)
    params = compute.put({n: p.float() if p.is_floating_point() else p for n, p in arrival.items()})
    samples = samples.loaded()
    answers: list[Tensor] = []
    tops: list[Tensor] = []
    with torch.no_grad():
        for number in range(copies + 1):
            asked = with_copies(samples, range(len(samples)), [number] * len(samples))
            # Texts of like length side by side have little padding between them.
            order = torch.arange(len(asked)) if asked.mask is None else asked.mask.sum(-1).argsort(stable=True)
            back = order.argsort()
            parts = [asked.rows(those).trimmed() for those in torch.split(order, at_once)]
            if not samples.documents:
                found = [predict(params, part.inputs, part.head).cpu().half() for part in parts]
                answers.append(torch.cat(found)[back])
                continue
            likeliest = [_likeliest(predict(params, part.inputs, part.head), part, top_k) for part in parts]
            width = samples.labels.shape[1]
            answers.append(torch.cat([_widened(answer, width) for answer, _ in likeliest])[back])
            tops.append(torch.cat([_widened(top, width) for _, top in likeliest])[back])
    answered = torch.stack(answers, 1)
    if not bool(torch.isfinite(answered).all()):
        raise OptionError(f"the arrival's answers on the samples of '{samples.task}' are not finite in half precision")
    return replace(samples, answers=answered, tops=torch.stack(tops, 1) if tops else None)


def with_copies(samples: Samples, rows: Sequence[int], numbers: Sequence[int]) -> Samples:
    """Copy `numbers[i]` of example `rows[i]` for every i, 0 being the example itself, each with its one answer."""
    index = torch.tensor(list(rows), dtype=torch.long)
    chosen = replace(samples, answers=None, tops=None).rows(index)
    if samples.answers is not None:
        which = index, torch.tensor(list(numbers))
        tops = None if samples.tops is None else samples.tops[which][:, None]
        chosen = replace(chosen, answers=samples.answers[which][:, None], tops=tops)
    places = [i for i, number in enumerate(numbers) if number]
    if not places:
        return chosen
    tokens = {LABELS: samples.labels} if samples.documents else {}  # which say what is judged of a document
    columns = samples.tensors | tokens
    copied = copy_rows(columns, [rows[i] for i in places], [numbers[i] for i in places], samples.task)
    changed = {name: columns[name][index] for name in columns}
    for name, tensor in copied.items():
        changed[name][places] = tensor
    return replace(chosen, labels=changed.pop(LABELS, chosen.labels), inputs=changed)


def answers_of(samples: Samples) -> dict[str, object]:
    """How many inputs the arrival was asked about, the samples and their copies, how many copies of each, and who wrote them."""
    if samples.answers is None:
        return {"answers": 0, "copies": None, "written": samples.written}
    rows, versions = samples.answers.shape[:2]
    return {"answers": rows * versions, "copies": versions - 1, "written": samples.written}


def told_apart(samples: Samples) -> float | None:
    """How far the answers depend on the input, from 0 to 1: the mutual information of both over the most that it can be.

    An expert says much the same of everything where it is asked about inputs that are like nothing it knows. None for texts, of
    which every token has an answer of its own, and for samples that are too few to tell.
    """
    if samples.answers is None or samples.documents or len(samples) < FEW:
        return None
    logs = samples.answers[:, 0].double().log_softmax(-1)
    chances, classes = logs.exp(), logs.shape[-1]
    # The mean over inputs of KL(answer ‖ mean answer); what never happens counts nothing.
    mean = chances.mean(0).clamp(min=1e-30).log()
    information = float((chances * (logs - mean)).sum(-1).mean())
    return max(0.0, information / log(min(classes, len(samples)))) if classes > 1 else None


def copied_of(samples: Samples) -> str | None:
    """How the copies were made that the arrival was asked about; None where it was asked about none."""
    asked = samples.answers is not None and samples.answers.shape[1] > 1
    return how_copied(samples.inputs, samples.documents) if asked else None


def answer_bytes(samples: Samples) -> int:
    """The answers to one sample and its copies, before they are compressed."""
    found = [t[:1] for t in (samples.answers, samples.tops) if t is not None]
    return sum(t.numel() * t.element_size() for t in found)


def _likeliest(logits: Tensor, rows: Samples, top_k: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the likeliest tokens, of as many that are drawn from the rest, and of all the rest; and which tokens.

    A token that was drawn is named −1 − token. All is zero where nothing is judged, and takes no room in a table.
    """
    logits = logits.float()
    values, tops = logits.topk(min(top_k, logits.shape[-1]), -1)
    others = logits.scatter(-1, tops, -torch.inf)
    rest = others.logsumexp(-1, keepdim=True)
    drawn = draw_evenly(others, top_k) if top_k < logits.shape[-1] else tops[..., :0]
    found = torch.cat([values, logits.gather(-1, drawn), rest], -1) - logits.logsumexp(-1, keepdim=True)
    here = functional.pad(judged(rows), (0, 1)).to(logits.device)[..., None]
    named = torch.cat([tops, -1 - drawn], -1)
    return torch.where(here, found.clamp(min=NEVER), 0.0).half().cpu(), (named * here).int().cpu()


def draw_evenly(logits: Tensor, count: int) -> Tensor:
    """`count` tokens of each place by their chance: at even steps along the sum of all chances, the first at a part of a step.

    That part follows from the place alone and falls evenly over the places, so a draw needs no seed and no batch changes it.
    """
    sums = logits.softmax(-1).cumsum(-1)
    places = torch.arange(1, logits.shape[-2] + 1, dtype=torch.float64, device=logits.device)
    first = (places * GOLDEN).frac()[:, None]
    steps = (torch.arange(count, device=logits.device) + first) / count
    return torch.searchsorted(sums, (steps.float() * sums[..., -1:]).contiguous(), right=True).clamp(
        max=logits.shape[-1] - 1
    )


def _widened(tensor: Tensor, places: int) -> Tensor:
    """With the columns of padding that were left out when the texts were read."""
    return functional.pad(tensor, (0, 0, 0, places - tensor.shape[1]))
