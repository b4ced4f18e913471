"""Words that came from a file, as they may stand on a terminal or a page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

# Cheap to look for: whatever is not plain ASCII or a letter, then asked one by one.
_DOUBTFUL = re.compile(r"[^ -~]")


def printable(text: str, keep: str = "") -> str:
    """The text with everything that steers a terminal or turns the direction of writing as \\x1b or \\u202e; `keep` stays."""
    return _DOUBTFUL.sub(lambda m: m[0] if m[0].isprintable() or m[0] in keep else _escape(m[0]), text)


def in_json(text: str) -> str:
    """The same for JSON that was written without its escapes for letters: only strings hold such characters."""
    return _DOUBTFUL.sub(lambda m: m[0] if m[0].isprintable() or m[0] == "\n" else _json(m[0]), text)


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table for a notebook; what came from a file can be no more than text in it."""

    def cells(kind: str, values: Sequence[object]) -> str:
        return "".join(f"<{kind} style='text-align:left'>{escape(printable(str(v)))}</{kind}>" for v in values)

    head = f"<caption style='text-align:left'>{escape(printable(title))}</caption><thead><tr>{cells('th', columns)}</tr></thead>"
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table>{head}<tbody>{body}</tbody></table>"


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode() if not "\ud800" <= character <= "\udfff" else _json(character)


def _json(character: str) -> str:
    code = ord(character)
    if code < 0x10000:
        return f"\\u{code:04x}"
    return f"\\u{0xD800 + (code - 0x10000 >> 10):04x}\\u{0xDC00 + (code & 0x3FF):04x}"
