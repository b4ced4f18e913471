"""The pages of the documentation and the examples on them, which are run for real.

A ```console block holds commands behind `$ ` and what they print; a ```python block is code. The blocks of a page run in
order in one scratch directory that holds the stream of examples/make_stream.py; on a page with the comment `<!-- trunk -->`
it also holds a trunk of three arrivals, and on one with `<!-- example: NAME -->` the files of examples/NAME. A block after `<!-- not run -->` is left alone. Rewrite what the commands print
after a change of the program with

    python tests/docs/pages.py
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mergeway.cli import main
from mergeway.rules import RULES

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SHOWN_AS = "/home/you/stream"  # what the scratch directory is called on the pages

_BLOCK = re.compile(
    r"^(?P<skip><!-- not run -->\n)?(?P<indent> *)```(?P<kind>console|python)\n(?P<body>.*?)^ *```$", re.M | re.S
)
# What differs from run to run and from machine to machine: digests, dates, the last digits of a number.
_VARIES = (
    (re.compile(r"\b[0-9a-f]{12}(?:[0-9a-f]{52})?\b"), "<digest>"),
    (re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d\+00:00"), "<date>"),
    (re.compile(r"(\d+\.\d{3})\d+"), r"\1"),
)
_TRUNK = (
    "mergeway init trunk --base base --rule opcm",
    "mergeway add trunk mnist",
    "mergeway add trunk svhn --weight 2",
    "mergeway add trunk dtd",
)


@dataclass(frozen=True)
class Block:
    """A runnable block: its kind, its text, and where the text stands on the page."""

    kind: str
    text: str
    start: int
    stop: int


def pages() -> list[Path]:
    """README and every page of the site."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def blocks(text: str) -> list[Block]:
    """The blocks of a page that are run."""
    return [
        Block(found["kind"], found["body"], found.start("body"), found.end("body"))
        for found in _BLOCK.finditer(text)
        if not found["skip"]
    ]


def make_stream(folder: Path) -> Path:
    """The stream all pages start from."""
    run_script(ROOT / "examples" / "make_stream.py", folder)
    return folder


def run_script(path: Path, *arguments: object) -> str:
    """What a script prints; it runs in this process, which spares the imports of torch and transformers."""
    printed, before = io.StringIO(), sys.argv
    sys.argv = [str(path), *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(path), run_name="__main__")
    finally:
        sys.argv = before
    return printed.getvalue()


def run_page(path: Path, stream: Path, scratch: Path) -> str:
    """Run the blocks of a page in an empty directory and return the page with what its commands really print."""
    text = path.read_text(encoding="utf-8")
    shutil.copytree(stream, scratch, dirs_exist_ok=True)
    for example in re.findall(r"<!-- example: (\w+) -->", text):
        shutil.copytree(ROOT / "examples" / example, scratch, dirs_exist_ok=True)
    with _inside(scratch), _same_rules():
        if "<!-- trunk -->" in text:
            for line in _TRUNK:
                _run(line)
        names: dict[str, object] = {"__name__": "page"}
        done, at = [], 0
        for block in blocks(text):
            if block.kind == "python":
                with contextlib.redirect_stdout(io.StringIO()):
                    exec(compile(block.text, path.name, "exec", dont_inherit=True), names)
                continue
            done += [text[at : block.start], _run_console(block.text, scratch)]
            at = block.stop
    return "".join([*done, text[at:]])


def plain(text: str) -> str:
    """A page without what may differ from run to run."""
    for pattern, word in _VARIES:
        text = pattern.sub(word, text)
    return "\n".join(line.rstrip() for line in text.splitlines())


def commands(text: str) -> list[str]:
    """The command lines of a page's console blocks, continued lines joined."""
    found = []
    for block in re.finditer(r"^ *```console\n(.*?)^ *```$", text, re.M | re.S):
        joined = block[1].replace("\\\n", " ")
        found += [line.removeprefix("$ ").strip() for line in joined.splitlines() if line.startswith("$ ")]
    return found


def _run_console(body: str, scratch: Path) -> str:
    shown = []
    for line in re.findall(r"^\$ .*(?:(?<=\\)\n.*)*", body, re.M):
        shown.append(line)
        output = _run(line.removeprefix("$ ").replace("\\\n", " ")).replace(str(scratch), SHOWN_AS)
        shown += [printed.rstrip() for printed in output.rstrip().splitlines()]
    return "\n".join(shown) + "\n"


def _run(line: str) -> str:
    """What a command line prints, both streams together; ours runs in this process, the rest in a shell."""
    ours, pipe, rest = line.partition(" | ")
    if not ours.startswith("mergeway "):
        return _shell(line)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        main(shlex.split(ours)[1:])
    return _shell(rest, printed.getvalue()) if pipe else printed.getvalue()


def _shell(line: str, given: str = "") -> str:
    return subprocess.run(
        ["bash", "-c", line],
        env=environment(),
        input=given,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    ).stdout


def environment() -> dict[str, str]:
    """What a command of the pages finds: our programs first, no network, one thread, a page's width."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "110"}


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    here, variables = Path.cwd(), dict(os.environ)
    os.chdir(folder)
    os.environ.update(environment())
    try:
        yield
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(variables)


@contextlib.contextmanager
def _same_rules() -> Iterator[None]:
    """A rule that a page registers is gone after it."""
    before = dict(RULES)
    try:
        yield
    finally:
        RULES.clear()
        RULES.update(before)


def rewrite(names: Sequence[str]) -> None:
    """Bring the output of every page, or of those named, up to date, leaving alone what differs only by dates and digests."""
    torch.set_num_threads(1)
    wanted = {Path(name).name for name in names}
    if unknown := wanted - {path.name for path in pages()}:
        raise SystemExit(f"no page is called {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as folder:
        stream = make_stream(Path(folder) / "stream")
        for number, path in enumerate(pages()):
            text = path.read_text(encoding="utf-8")
            if not blocks(text) or (names and path.name not in wanted):
                continue
            fresh = run_page(path, stream, Path(folder) / f"page-{number}")
            if plain(fresh) != plain(text):
                path.write_text(fresh, encoding="utf-8")
                print(f"rewrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    rewrite(sys.argv[1:])
