"""Reading the options of a rule: from text to the declared type, with an error that names the option."""

from __future__ import annotations

import math
import types
import typing
from typing import Literal, Protocol

from mergeway.errors import OptionError

_NUMBERS: dict[object, str] = {int: "a whole number", float: "a number"}


class Named(Protocol):
    """What an error about an option says it belongs to."""

    @property
    def name(self) -> str: ...


def read_option(what: str, value: object, kind: object) -> object:
    """A value, or its text from a command line, as the type that the option is declared with."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        kinds = [k for k in typing.get_args(kind) if k is not types.NoneType]
        if value is None and len(kinds) < len(typing.get_args(kind)):
            return None
        words = [word for k in kinds if typing.get_origin(k) is Literal for word in typing.get_args(k)]
        if value in words:
            return value
        try:
            return read_option(what, value, kinds[0])
        except OptionError as problem:
            raise OptionError(f"{problem}{''.join(f' or {word}' for word in words)}") from None
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            raise OptionError(f"{what} is {value!r}; it takes {' or '.join(choices)}")
        return value
    if kind is bool:
        words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
        if str(value).lower() not in words:
            raise OptionError(f"{what} is {value!r}; it takes true or false")
        return words[str(value).lower()]
    try:
        if kind is int and isinstance(value, float) and not value.is_integer():
            raise ValueError
        number = _converted(kind, value)
    except (TypeError, ValueError):
        wanted = _NUMBERS.get(kind) or getattr(kind, "__name__", str(kind))
        raise OptionError(f"{what} is {value!r}; it takes {wanted}") from None
    if isinstance(number, float) and not math.isfinite(number):
        raise OptionError(f"{what} is {value!r}; it takes a finite number")
    return number


def _converted(kind: object, value: object) -> object:
    return kind(value) if callable(kind) else value


def check_range(rule: Named, option: str, low: float, high: float) -> None:
    """Refuse an option outside [low, high]; for a rule's `__post_init__`."""
    value = getattr(rule, option)
    if not low <= value <= high:
        upper = "" if math.isinf(high) else f" and at most {high:g}"
        raise OptionError(f"option '{option}' of rule '{rule.name}' is {value!r}; it must be at least {low:g}{upper}")
