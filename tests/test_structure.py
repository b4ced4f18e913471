"""The shape of the source: small functions, small files, one file for each rule, ten rooms, and a short walk for one `add`."""

from __future__ import annotations

import ast
import inspect
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import mergeway as mw
from mergeway.model import model as model_room
from mergeway.rules import RULES

SOURCE = Path(__file__).parents[1] / "src" / "mergeway"
ROOMS = ["cli", "bench", "train", "trunk", "fold", "rules", "calibration", "model", "checkpoint", "core"]
LONGEST_FUNCTION, LONGEST_FILE, LONGEST_RULE = 60, 250, 100
MOST_ANY = 100


def files() -> Iterator[tuple[str, str]]:
    """Every file of the source with its text."""
    for path in sorted(SOURCE.rglob("*.py")):
        yield str(path.relative_to(SOURCE)), path.read_text()


def lines(text: str) -> int:
    return len(text.splitlines())


def test_no_function_is_long():
    """Docstring and decorators count."""
    found = {}
    for name, text in files():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                found[f"{name}:{node.name}"] = node.end_lineno - first + 1
    assert {name: n for name, n in found.items() if n > LONGEST_FUNCTION} == {}


def test_no_file_is_long():
    assert {name: lines(text) for name, text in files() if lines(text) > LONGEST_FILE} == {}


def test_a_rule_is_one_short_file():
    own = {rule.__module__ for rule in RULES.values() if rule.__module__.startswith("mergeway.rules.")}
    assert len(own) == 12
    found = {module: lines(Path(str(sys.modules[module].__file__)).read_text()) for module in own}
    assert {module: n for module, n in found.items() if n >= LONGEST_RULE} == {}


def test_any_is_rare():
    """Where a type is not known, it is the outside: a module of the user's, a file, another library."""
    found = {name: sum(_is_any(node) for node in ast.walk(ast.parse(text))) for name, text in files()}
    assert sum(found.values()) <= MOST_ANY, dict(sorted(found.items(), key=lambda row: -row[1]))


def _is_any(node: ast.AST) -> bool:
    return (isinstance(node, ast.Name) and node.id == "Any") or (isinstance(node, ast.Attribute) and node.attr == "Any")


def test_the_layers_are_the_rooms():
    tomllib = pytest.importorskip("tomllib", reason="python 3.11 and later")
    settings = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["tool"]["importlinter"]
    [contract] = [c for c in settings["contracts"] if c["type"] == "layers"]
    assert contract["layers"] == [*(f"mergeway.{room}" for room in ROOMS), "mergeway.errors"]
    assert sorted(p.parent.name for p in SOURCE.glob("*/__init__.py")) == sorted(ROOMS)
    assert sorted(p.name for p in SOURCE.glob("*.py")) == ["__init__.py", "__main__.py", "errors.py"]


# 18 were wished for; but these files have 8,000 lines, which is 33 at the length that a file may have. Lower it when the walk gets shorter.
MOST_FILES = 60


def test_one_add_is_a_short_walk(vision, tmp_path, monkeypatch):
    """The second add of a trunk with `steer`: the files whose functions run, and one loading of the weights."""
    loads = []
    load = model_room.load_weights

    def counted(family: Any, directory: Path, *more: Any) -> Any:
        loads.append(directory)
        return load(family, directory, *more)

    monkeypatch.setattr(model_room, "load_weights", counted)
    trunk = mw.Trunk.create(tmp_path / "trunk", vision.base, "steer", threads=1)
    trunk.add(vision.task("ants").expert, "ants", data=f"{vision.path}#ants")
    trunk = mw.Trunk.open(trunk.path, threads=1)
    loads.clear()
    with Trace() as trace:
        trunk.add(vision.task("bees").expert, "bees", data=f"{vision.path}#bees")
    assert loads == [vision.base]
    assert "fold/stream.py" in trace.files and "rules/steer/rule.py" in trace.files
    assert len(trace.files) <= MOST_FILES, f"{len(trace.functions)} functions in {sorted(trace.files)}"


class Trace:
    """The functions of mergeway that run, on every thread; not bodies of modules and classes, comprehensions and lambdas."""

    def __init__(self) -> None:
        self.functions: set[tuple[str, str]] = set()

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.functions}

    def __enter__(self) -> Trace:
        threading.setprofile(self._seen)
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _seen(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        named = code.co_flags & inspect.CO_OPTIMIZED and not code.co_name.startswith("<")
        if event == "call" and named and code.co_filename.startswith(str(SOURCE)):
            self.functions.add(
                (str(Path(code.co_filename).relative_to(SOURCE)), f"{code.co_name}:{code.co_firstlineno}")
            )
