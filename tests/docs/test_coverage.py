"""The page of what the papers have: every file, test and command that it names is there, and what is missing says so."""

from __future__ import annotations

import ast
import re
import shlex

import pages
import pytest
from test_documented import COMMANDS, options_of

from mergeway.bench.paper import ITEMS
from mergeway.bench.protocol import parse_rule
from mergeway.bench.suites.handwritten import INCREMENTAL
from mergeway.bench.suites.named import recipes

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (pages.DOCS / "coverage.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| |")
]


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_what_a_line_names_is_there(row):
    _, _, file, test, command = row
    for path in named(file):
        assert (pages.ROOT / path).is_file(), path
    for where in named(test):
        path, _, name = where.partition("::")
        tree = ast.parse((pages.ROOT / path).read_text(encoding="utf-8"))
        tests = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert name in tests if name else any(t.startswith("test_") for t in tests), where
    for line in named(command):
        _check_command(shlex.split(line))
    if "missing" in file:
        assert not named(command), "what is missing has no command"
    elif named(file):
        assert named(test), "what is there has a test"


def _check_command(words: list[str]) -> None:
    program, command, *rest = words
    assert program == "mergeway" and command in COMMANDS, words
    for option, value in zip(rest, [*rest, ""][1:], strict=True):
        if option.startswith("--"):
            assert option in options_of(command), option
        if option == "--rules":
            parse_rule(value)
        if option in ("--table", "--figure"):
            assert value in {item.name for item in ITEMS if item.kind == option[2:]}, value
    if command == "bench":
        assert rest[0] in {"digits", *INCREMENTAL, *recipes()}, rest[0]


def test_every_table_and_figure_of_bench_is_on_the_page():
    shown = {(kind, name) for row in ROWS for kind, name in re.findall(r"--(table|figure) (\S+?)`", row[4])}
    known = {(i.kind, i.name) for i in ITEMS if i.name[:3] in ("ode", "opc", "hol")}
    assert known - shown <= {("figure", "holistic-6"), ("figure", "holistic-7")}


def test_every_equation_is_on_the_page():
    """58 equations of ODE-M, 38 of OPCM, 4 of Holistic CMM, by the numbers in the first column."""
    text = (pages.DOCS / "coverage.md").read_text(encoding="utf-8")
    for title, count in (("ODE-M", 58), ("OPCM", 38), ("Holistic CMM", 4)):
        part = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
        assert part
        found: set[int] = set()
        for cell in (
            line.split("|")[1]
            for line in part[1].splitlines()
            if line.startswith("| ") and "Eq. " in line.split("|")[1]
        ):
            for low, high in re.findall(r"\b(\d+)(?:-(\d+))?", cell.split("Eq. ", 1)[1]):
                found |= set(range(int(low), int(high or low) + 1))
        assert set(range(1, count + 1)) <= found, sorted(set(range(1, count + 1)) - found)
