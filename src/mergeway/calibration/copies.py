"""Copies of samples: inputs that nobody collected, made by a seeded change of a sample.

The arrival answers for a copy, so a copy need not keep its sample's meaning, and it cannot be mislabelled. A copy follows from
its seed, its sample and a sample before it: the memory keeps the answers, not the inputs, and what it keeps after it shrank
to its first rows still holds every copy of those rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from mergeway.calibration.samples import JUDGE_EVERY, judges
from mergeway.core.tensors import whole_numbers

# What a copy is drawn by, whatever else is copied: the key of its task, its row, its number.
Name = tuple[int, int, int]

BENT = 0.25  # how far each entry of the matrix that turns, stretches and slants a picture may be from the identity
SHIFTED = 1 / 14  # of its side, how far a picture moves at most: two pixels of 28
LEAST_SHARE = 0.6  # of the own picture in a mixed one
DROPPED = 1 / 7  # share of a text's tokens that are left out
SPLICED = 0.5  # share of the copies that go on with the end of another text
LEAST_BEGINNING = 0.25  # of a document that a copy of it keeps, at most all but as much
LABELS = "labels"  # the column that only documents have: which of their tokens are judged


def copy_rows(
    inputs: Mapping[str, Tensor], rows: Sequence[int], numbers: Sequence[int], seed: str
) -> dict[str, Tensor]:
    """Copy `numbers[i]` of row `rows[i]`, for every i; other inputs than pictures, texts and documents come back as they are."""
    key = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little")
    named = [(key, row, number) for row, number in zip(rows, numbers, strict=True)]
    if LABELS in inputs:
        return _copy_documents(inputs, named)
    if "images" in inputs:
        return {"images": _copy_images(inputs["images"], named)}
    if "input_ids" in inputs and "attention_mask" in inputs:
        return _copy_texts(inputs, named)
    return {name: tensor[list(rows)] for name, tensor in inputs.items()}


def how_copied(inputs: Mapping[str, object], documents: bool) -> str:
    """In a few words, for a journal."""
    if documents:
        return "begun as the document, gone on as an earlier one"
    if "images" in inputs:
        return "shifted, bent, and mixed with an earlier picture"
    return "words left out, every other one gone on as an earlier text" if "input_ids" in inputs else "as they are"


def _other(draw: np.random.Generator, row: int) -> int:
    """A sample before this one that judges too, or does not either; the first of each kind has only itself."""
    if judges(row):
        before = range(row % JUDGE_EVERY, row, JUDGE_EVERY)
        return before[draw.integers(0, len(before))] if before else row
    while judges(other := int(draw.integers(0, max(row, 1)))):
        pass
    return other


class _Change(NamedTuple):
    """What a picture keeps of itself, which one it is mixed with, and how the two are moved: [A | b] of x ↦ A·x + b."""

    share: float
    other: int
    own_move: np.ndarray
    other_move: np.ndarray


@lru_cache(1 << 16)  # the same copies come back in many batches, and a generator costs more than a picture
def _change(name: Name) -> _Change:
    draw = np.random.default_rng(name)
    # Both sides of a picture are 2 long where it is sampled, from −1 to 1.
    most = np.array([[BENT, BENT, 2 * SHIFTED]] * 2)
    own, other = np.eye(2, 3) + most * draw.uniform(-1.0, 1.0, (2, 2, 3))
    return _Change(draw.uniform(LEAST_SHARE, 1.0), _other(draw, name[1]), own, other)


def _copy_images(images: Tensor, names: Sequence[Name]) -> Tensor:
    """Shifted and bent, then mixed with another picture of the task that was, the own one keeping the greater share."""
    changes = [_change(name) for name in names]
    own = _moved(images[[row for _, row, _ in names]], np.stack([c.own_move for c in changes]))
    other = _moved(images[[c.other for c in changes]], np.stack([c.other_move for c in changes]))
    share = torch.tensor([c.share for c in changes]).view(-1, 1, 1, 1)
    return torch.lerp(other, own, share).round_().to(images.dtype)


def _moved(images: Tensor, moves: np.ndarray) -> Tensor:
    """Each picture seen through its own move; beyond its edge it goes on as it ends."""
    channels_first = images.permute(0, 3, 1, 2).float()
    grid = functional.affine_grid(
        torch.as_tensor(moves, dtype=torch.float32), list(channels_first.shape), align_corners=False
    )
    seen = functional.grid_sample(channels_first, grid, padding_mode="border", align_corners=False)
    return seen.permute(0, 2, 3, 1)


def _copy_texts(inputs: Mapping[str, Tensor], names: Sequence[Name]) -> dict[str, Tensor]:
    """Some tokens left out; every other copy goes on with the end of another text. The first and last token stay."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
    copied = torch.zeros(len(names), ids.shape[1], dtype=ids.dtype)
    seen = torch.zeros(len(names), ids.shape[1], dtype=inputs["attention_mask"].dtype)
    for place, name in enumerate(names):
        row, draw = name[1], np.random.default_rng(name)
        tokens = whole_numbers(ids[row][mask[row]])
        if len(tokens) > 2:
            first, *body, last = tokens
            kept = [token for token in body if draw.random() >= DROPPED] or body
            if draw.random() < SPLICED:
                other = _other(draw, row)
                end = whole_numbers(ids[other][mask[other]])[1:-1]
                kept = kept[: max(1, round(len(kept) * draw.uniform(0.5, 1.0)))] + end[len(end) // 2 :]
            tokens = [first, *kept[: ids.shape[1] - 2], last]
        # Only what came before may say what padding is, or a copy would change with what follows.
        copied[place] = _padding(ids[: row + 1], mask[: row + 1])
        copied[place, : len(tokens)] = torch.tensor(tokens, dtype=ids.dtype)
        seen[place, : len(tokens)] = 1
    return {"input_ids": copied, "attention_mask": seen}


def _copy_documents(columns: Mapping[str, Tensor], names: Sequence[Name]) -> dict[str, Tensor]:
    """The beginning of a document, which goes on as another one does from there; every token keeps its place."""
    mask = columns["attention_mask"]
    rows = [row for _, row, _ in names]
    others: list[int] = []
    cuts: list[int] = []
    for name in names:
        draw = np.random.default_rng(name)
        share = draw.uniform(LEAST_BEGINNING, 1 - LEAST_BEGINNING)
        cuts.append(max(2, round(share * int(mask[name[1]].sum()))))
        others.append(_other(draw, name[1]))
    own = torch.arange(mask.shape[1]) < torch.tensor(cuts)[:, None]
    return {key: torch.where(own, column[rows], column[others]) for key, column in columns.items()}


def _padding(ids: Tensor, mask: Tensor) -> int:
    empty = ids[~mask]
    return int(empty[0]) if len(empty) else 0
