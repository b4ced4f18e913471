"""Four tasks for a model that follows instructions: a question, and the one answer that is right.

Two are real texts: is a mail spam, and what kind of text is a passage. Two are made by a seed: sums in words, and sentences as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

from mergeway.bench.suites.corpora import BROWN, MAILS, brown, mails

CHARACTERS = 200  # of a text that a question is about
_KINDS = {"news": "ab", "religion": "d", "government": "h", "science": "j", "fiction": "klnp"}
_SMALL = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_NAMES = [
    "Ada",
    "Ben",
    "Chloe",
    "David",
    "Emma",
    "Femi",
    "Grace",
    "Hugo",
    "Ines",
    "Jonas",
    "Kira",
    "Liam",
    "Mona",
    "Nils",
    "Olga",
    "Paul",
    "Rosa",
    "Sami",
    "Tara",
    "Umar",
]
_CITIES = [
    "Lagos",
    "Oslo",
    "Lima",
    "Quito",
    "Turin",
    "Kyoto",
    "Perth",
    "Cairo",
    "Delhi",
    "Paris",
    "Boston",
    "Dublin",
    "Geneva",
    "Havana",
    "Prague",
    "Seoul",
]
_WORK = ["baker", "nurse", "pilot", "farmer", "teacher", "lawyer", "painter", "driver", "singer", "tailor"]


@dataclass(frozen=True)
class Instruction:
    """A task: what is asked and answered, and under which licence."""

    name: str
    licence: str
    pairs: Callable[[Path], Iterator[tuple[str, str]]]


def chat(question: str, answer: str) -> dict[str, object]:
    """A pair as a line of a task's data."""
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def in_words(number: int) -> str:
    """A number below a hundred."""
    if number < 20:
        return _SMALL[number]
    tens, ones = divmod(number, 10)
    return _TENS[tens - 2] + (f"-{_SMALL[ones]}" if ones else "")


def _beginning(text: str) -> str:
    return " ".join(text.split())[:CHARACTERS].strip()


def _spam(packages: Path) -> Iterator[tuple[str, str]]:
    """Spam and other mails by turns."""
    for pair in zip(mails(packages, "spam-2"), mails(packages, "easy-ham-2"), strict=False):
        for mail, answer in zip(pair, ("yes", "no"), strict=True):
            if text := _beginning(mail):
                yield f"Is this mail spam? Answer yes or no.\n\n{text}", answer


def _topic(packages: Path) -> Iterator[tuple[str, str]]:
    """Five passages of each text, and texts of five kinds by turns."""
    *others, last = _KINDS
    asked = f"What kind of text is this: {', '.join(others)} or {last}?"
    kinds = [list(brown(packages, letters)) for letters in _KINDS.values()]
    for texts in zip(*kinds, strict=False):
        for part in range(1, 6):
            for kind, text in zip(_KINDS, texts, strict=True):
                passage = _beginning(text[part * 5 * CHARACTERS :].partition(" ")[2])
                if len(passage) > CHARACTERS // 2:
                    yield f"{asked}\n\n{passage}", kind


def _sums(_: Path) -> Iterator[tuple[str, str]]:
    draw = Random(0)  # noqa: S311 - no secret
    while True:
        a, b = draw.randrange(2, 60), draw.randrange(2, 40)
        if draw.random() < 0.5:
            yield f"What is {in_words(a)} plus {in_words(b)}? Answer in digits.", str(a + b)
        else:
            yield f"What is {in_words(a + b)} minus {in_words(b)}? Answer in digits.", str(a)


def _records(_: Path) -> Iterator[tuple[str, str]]:
    draw = Random(1)  # noqa: S311 - no secret
    while True:
        name, city, work, age = draw.choice(_NAMES), draw.choice(_CITIES), draw.choice(_WORK), draw.randrange(18, 80)
        sentence = draw.choice(
            (
                f"{name}, {age}, works as a {work} in {city}.",
                f"In {city} lives a {work} called {name} who is {age} years old.",
                f"At the age of {age} {name} became a {work} and moved to {city}.",
            )
        )
        yield f"Write as JSON: {sentence}", json.dumps({"name": name, "age": age, "job": work, "city": city})


INSTRUCTIONS = (
    Instruction("spam", MAILS.licence, _spam),
    Instruction("topic", BROWN.licence, _topic),
    Instruction("sums", "made by mergeway", _sums),
    Instruction("json", "made by mergeway", _records),
)


def divided(
    task: Instruction, packages: Path, train: int, test: int
) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Lines to train and to test on; no question is in both."""
    seen: dict[str, str] = {}
    for question, answer in islice(task.pairs(packages), 20 * (train + test)):
        seen.setdefault(question, answer)
        if len(seen) == train + test:
            break
    lines = [chat(question, answer) for question, answer in seen.items()]
    # Tests are the first ones, not some from everywhere: neighbours may be of one text.
    return lines[test:], lines[:test]
