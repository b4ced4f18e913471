"""The n-th largest of very many magnitudes that are never held together: exact, in two walks over them and little memory.

A random sample brackets the value; one walk then counts what lies above and keeps only what lies between.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

SAMPLE = 1 << 20


class Seen(NamedTuple):
    """What a look at a block finds: some of its magnitudes, how many lie above the bracket, and how many on its ends."""

    kept: np.ndarray
    above: int = 0
    at_high: int = 0
    at_low: int = 0


# What a walk does with a block of values, and a search: it asks for walks and is sent their results, block by block.
Look = Callable[[Tensor], Seen]
Search = Generator[Look, list[Seen], float]


def nth_largest(size: int, n: int) -> Search:
    """Search for the n-th largest of `size` magnitudes: infinity for none of them, zero for all."""
    if n <= 0:
        return float("inf")
    if n >= size:
        return 0.0
    drawn = yield _draw(min(1.0, SAMPLE / size))
    sample = np.sort(np.concatenate([f.kept for f in drawn]))[::-1]
    margin = 6.0
    while True:
        low, high = _bracket(sample, n / size, margin)
        found = yield _count(low, high)
        above, at_high, at_low = (sum(f[i] for f in found) for i in (1, 2, 3))
        inside = np.concatenate([f.kept for f in found])
        # Many entries may be equal to an end of the bracket (zeros, coarse dtypes), so the ends are counted, not kept.
        if above < n <= above + at_high:
            return high
        rank = n - above - at_high
        if 0 < rank <= inside.size:
            return float(np.partition(inside, inside.size - rank)[inside.size - rank])
        if 0 < rank <= inside.size + at_low:
            return low
        margin *= 4


def search_together(
    walk: Callable[[Callable[..., list[Seen]]], list[list[Seen]]], searches: Sequence[Search]
) -> list[float]:
    """Run searches over several vectors side by side, so that each walk serves them all.

    `walk(looks)` calls looks(block of the first vector, block of the second, …) everywhere and returns the results in order.
    """
    found: list[float] = [0.0] * len(searches)
    wanted: dict[int, Look] = {}

    def advance(i: int, results: list[Seen] | None) -> None:
        try:
            wanted[i] = searches[i].send(results)  # pyright: ignore[reportArgumentType] - None starts a generator
        except StopIteration as done:
            wanted.pop(i, None)
            found[i] = done.value

    for i in range(len(searches)):
        advance(i, None)
    while wanted:
        blocks = walk(lambda *vectors: [wanted[i](vectors[i]) for i in wanted])
        for place, i in enumerate(list(wanted)):
            advance(i, [block[place] for block in blocks])
    return found


def _draw(share: float) -> Look:
    def look(block: Tensor) -> Seen:
        picks = max(1, round(share * block.numel()))
        chosen = np.random.default_rng(block.numel()).integers(block.numel(), size=picks)
        return Seen(_on_host(abs(_native(block)[chosen])))

    return look


def _count(low: float, high: float) -> Look:
    """How many magnitudes lie above the bracket, on its upper and on its lower end, and those strictly inside."""

    def look(block: Tensor) -> Seen:
        x = abs(_native(block))
        over, below = x >= high, x <= low
        above, at_least, under, at_most = map(_count_true, (x > high, over, x < low, below))
        inside = x[~(over | below)]  # pyright: ignore[reportArgumentType] - a mask of the same library
        return Seen(_on_host(inside), above, at_least - above, at_most - under)

    return look


def _native(block: Tensor) -> np.ndarray | Tensor:
    """The flat block as what compares and counts fastest where it is: NumPy's array on the CPU, which has the same operators."""
    flat = block.reshape(-1)
    return flat.numpy() if flat.device.type == "cpu" else flat


def _count_true(mask: np.ndarray | Tensor) -> int:
    return int(np.count_nonzero(mask) if isinstance(mask, np.ndarray) else torch.count_nonzero(mask))


def _on_host(values: np.ndarray | Tensor) -> np.ndarray:
    return values if isinstance(values, np.ndarray) else values.to("cpu").numpy()


def _bracket(sample: np.ndarray, share: float, margin: float) -> tuple[float, float]:
    """Values that hold the quantile between them with near certainty: its rank in the sample, ± margin standard deviations."""
    spread = margin * (sample.size * share * (1 - share)) ** 0.5 + margin
    above, below = int(sample.size * share - spread), int(sample.size * share + spread) + 1
    high = float(sample[above]) if above >= 0 else float("inf")
    low = float(sample[below]) if below < sample.size else 0.0
    return low, high
