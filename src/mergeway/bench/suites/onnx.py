"""The weights in an ONNX file, and what they are multiplied into: as much of the format as it takes to find them by name.

The file is a protocol buffer. A message is a row of fields, each with a number and a kind: 0 a number, 2 so many bytes, 1 and 5 eight
and four bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mergeway.errors import OptionError

_GRAPH, _NODE, _WEIGHT = 7, 1, 5  # fields of a model, and of its graph
_INPUT, _OUTPUT, _OPERATION = 1, 2, 4  # of a node
_SIZES, _KIND, _NAME, _BYTES = 1, 2, 8, 9  # of a weight
_FLOAT = 1  # the kind of numbers that is read


@dataclass(frozen=True)
class Node:
    """One operation: its kind, and the names of what goes in and comes out."""

    operation: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Graph:
    """The float weights of a model by name, and its operations in the order they are done."""

    weights: dict[str, np.ndarray]
    nodes: tuple[Node, ...]


def read_onnx(data: bytes) -> Graph:
    """The graph in a file."""
    try:
        graph = next(value for field, value in _fields(memoryview(data)) if field == _GRAPH)
        weights: dict[str, np.ndarray] = {}
        nodes: list[Node] = []
        for field, value in _fields(_bytes(graph)):
            if field == _NODE:
                nodes.append(_node(_bytes(value)))
            elif field == _WEIGHT:
                weights |= _weight(_bytes(value))
    except (StopIteration, IndexError, UnicodeDecodeError, TypeError, ValueError):
        raise OptionError("the package's model is no ONNX file that can be read; get it anew") from None
    return Graph(weights, tuple(nodes))


def _fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    at = 0
    while at < len(message):
        key, at = _number(message, at)
        field, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _number(message, at)
            yield field, value
        elif kind in (1, 2, 5):
            size, at = _number(message, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
            if at + size > len(message):
                raise IndexError
            yield field, message[at : at + size]
            at += size
        else:
            raise ValueError(kind)


def _number(message: memoryview, at: int) -> tuple[int, int]:
    """Seven bits a byte, the lowest first; the eighth says that there are more."""
    value = shift = 0
    while True:
        byte = message[at]
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at


def _bytes(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise TypeError
    return value


def _text(value: int | memoryview) -> str:
    return bytes(_bytes(value)).decode()


def _node(message: memoryview) -> Node:
    fields = list(_fields(message))
    names = {at: tuple(_text(v) for f, v in fields if f == at) for at in (_INPUT, _OUTPUT)}
    operation = next((_text(v) for f, v in fields if f == _OPERATION), "")
    return Node(operation, names[_INPUT], names[_OUTPUT])


def _weight(message: memoryview) -> dict[str, np.ndarray]:
    sizes: list[int] = []
    found: dict[int, int | memoryview] = {}
    for field, value in _fields(message):
        if field != _SIZES:
            found[field] = value
        elif isinstance(value, int):
            sizes.append(value)
        else:  # several numbers in one field
            at = 0
            while at < len(value):
                size, at = _number(value, at)
                sizes.append(size)
    if found.get(_KIND) != _FLOAT or _BYTES not in found:
        return {}
    return {_text(found[_NAME]): np.frombuffer(_bytes(found[_BYTES]), "<f4").reshape(sizes)}
