"""Named parameters: which dtypes merge, which tensors are linear weights, how a large one is cut into blocks, and its digest."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from blake3 import blake3
from torch import Tensor

from mergeway.errors import OptionError, suggest

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

# Elements handled at once by rules that work element by element: small enough that all operands of a block stay in the
# cache (four times faster than whole tensors, measured), large enough that the cost of a torch call does not show.
BLOCK = 1 << 18

_EMBEDDING = re.compile(
    r"embed|(^|[._])(wte|wpe|shared|relative_attention_bias|position|token_type)([._]|$)", re.IGNORECASE
)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of all arithmetic on a tensor: float32, except that float64 models lose nothing."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def read_dtype(text: str) -> torch.dtype:
    """A dtype by its name."""
    known = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS}
    if text not in known:
        raise OptionError(f"dtype '{text}': {suggest(text, known)}")
    return known[text]


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a stored tensor, known without reading it."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def merges(self) -> bool:
        return self.dtype in FLOATS


@dataclass(frozen=True)
class Part:
    """The piece of a parameter that a rule sees: a whole matrix, or elements [start, stop) of the flattened tensor."""

    name: str
    start: int
    stop: int
    matrix: tuple[int, int] | None = None


def is_embedding(name: str) -> bool:
    """Whether a parameter's name says that it is an embedding table."""
    return _EMBEDDING.search(name) is not None


def is_linear(name: str, shape: tuple[int, ...], pattern: str | None = None) -> bool:
    """Whether a parameter is the weight of a linear layer, by name and shape; `pattern` (a regex) decides instead when given.

    Embeddings are matrices too, but their rows are looked up, not multiplied with, so the papers' matrix rules pass them by.
    """
    if pattern is not None:
        return len(shape) >= 2 and 0 not in shape and compiled(pattern).search(name) is not None
    return len(shape) == 2 and min(shape) > 1 and name.endswith("weight") and not is_embedding(name)


@lru_cache
def compiled(pattern: str) -> re.Pattern[str]:
    """The regex that names linear weights, or an error that says why it is none."""
    try:
        return re.compile(pattern)
    except re.error as problem:
        raise OptionError(f"option 'linear': {pattern!r} is not a regular expression ({problem})") from None


def whole_numbers(tensor: Tensor) -> list[int]:
    """The values of a vector of integers."""
    return tensor.tolist()


def parts(name: str, shape: tuple[int, ...], matrix: bool) -> Iterator[Part]:
    """The pieces of one parameter in order; a convolution treated as a matrix has its kernel flattened into columns."""
    numel = prod(shape)
    if matrix:
        yield Part(name, 0, numel, (shape[0], numel // shape[0]))
        return
    for start in range(0, numel, BLOCK):
        yield Part(name, start, min(start + BLOCK, numel))


def begin_digest() -> blake3:
    """The digest of a tensor that comes block by block: BLAKE3, three times as fast as SHA-256, which is for all that is short."""
    return blake3()


def digest_tensor(tensor: Tensor) -> str:
    """The BLAKE3 of a tensor's bytes."""
    return blake3(as_bytes(tensor)).hexdigest()


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, not copied."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
