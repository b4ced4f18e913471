"""Copies of samples: inputs that nobody collected, made by a seeded change of a sample.

The arrival answers for a copy, so a copy need not keep its sample's meaning, and it cannot be mislabelled. A copy follows from
its seed, its sample and a sample before it: the memory keeps the answers, not the inputs, and what it keeps after it shrank
to its first rows still holds every copy of those rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

SHIFT = 14  # a picture moves by up to one part in so many of its side: two pixels of 28
LEAST_SHARE = 0.5  # of the own picture in a mixed one
DROPPED = 1 / 7  # share of a text's tokens that are left out
SPLICED = 0.5  # share of the copies that go on with the end of another text


def copy_rows(
    inputs: Mapping[str, Tensor], rows: Sequence[int], numbers: Sequence[int], seed: str
) -> dict[str, Tensor]:
    """Copy `numbers[i]` of row `rows[i]`, for every i; other inputs than pictures and texts come back as they are."""
    draws = [_draws(seed, row, number) for row, number in zip(rows, numbers, strict=True)]
    if "images" in inputs:
        return {"images": _copy_images(inputs["images"], rows, draws)}
    if "input_ids" in inputs and "attention_mask" in inputs:
        return _copy_texts(inputs, rows, draws)
    return {name: tensor[list(rows)] for name, tensor in inputs.items()}


def _draws(seed: str, row: int, number: int) -> np.random.Generator:
    """The random numbers of one copy, whatever else is copied."""
    key = hashlib.sha256(seed.encode()).digest()[:8]
    return np.random.default_rng([int.from_bytes(key, "little"), row, number])


def _other(draw: np.random.Generator, row: int) -> int:
    """A sample before this one; the first has only itself."""
    return int(draw.integers(0, max(row, 1)))


def _copy_images(images: Tensor, rows: Sequence[int], draws: Sequence[np.random.Generator]) -> Tensor:
    """Shifted, then mixed with another picture of the task, the own one keeping at least half."""
    most = max(1, images.shape[1] // SHIFT)
    copies: list[Tensor] = []
    for row, draw in zip(rows, draws, strict=True):
        down, right = (int(v) for v in draw.integers(-most, most + 1, 2))
        share = draw.uniform(LEAST_SHARE, 1.0)
        own = torch.roll(images[row], (down, right), (0, 1)).float()
        copies.append((share * own + (1 - share) * images[_other(draw, row)].float()).round().to(images.dtype))
    return torch.stack(copies)


def _copy_texts(
    inputs: Mapping[str, Tensor], rows: Sequence[int], draws: Sequence[np.random.Generator]
) -> dict[str, Tensor]:
    """Some tokens left out; every other copy goes on with the end of another text. The first and last token stay."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
    empty = ids[~mask]
    pad = int(empty[0]) if len(empty) else 0
    copied = torch.full((len(rows), ids.shape[1]), pad, dtype=ids.dtype)
    seen = torch.zeros_like(copied)
    for place, (row, draw) in enumerate(zip(rows, draws, strict=True)):
        first, *body, last = ids[row][mask[row]].tolist() if int(mask[row].sum()) > 2 else (None, None)
        if first is None:
            tokens = ids[row][mask[row]].tolist()
        else:
            kept = [token for token in body if draw.random() >= DROPPED] or body
            if draw.random() < SPLICED:
                other = ids[_other(draw, row)][mask[_other(draw, row)]].tolist()[1:-1]
                kept = kept[: max(1, round(len(kept) * draw.uniform(0.5, 1.0)))] + other[len(other) // 2 :]
            tokens = [first, *kept[: ids.shape[1] - 2], last]
        copied[place, : len(tokens)] = torch.tensor(tokens, dtype=ids.dtype)
        seen[place, : len(tokens)] = 1
    return {"input_ids": copied, "attention_mask": seen.to(inputs["attention_mask"].dtype)}
