"""What a model is called with: named parameters, a batch of inputs, and the head of a task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

Params = Mapping[str, Tensor]
# A task's frozen head: class vectors, or named tensors that take the place of the model's own.
Head = Tensor | Mapping[str, Tensor] | None


class LazyTensor(Protocol):
    """Rows that are read when a model looks at them, so that a task may be larger than memory."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice | Tensor) -> LazyTensor: ...

    def load(self) -> Tensor:
        """The rows as a tensor."""
        ...


Inputs = Mapping[str, Tensor | LazyTensor]


def in_memory(value: Tensor | LazyTensor) -> Tensor:
    """A tensor as it is, rows of a large dataset read now."""
    return value if isinstance(value, Tensor) else value.load()
