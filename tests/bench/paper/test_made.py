"""Every table and figure made for real on a tiny suite, in every format, and nothing run twice."""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ElementTree

import pytest
import tiny
from PIL import Image

from mergeway.bench.paper import ITEMS

# Those of incremental suites have tests of their own.
TABLES = [item.name for item in ITEMS if item.kind == "table" and "task" in item.protocols]
FIGURES = [item.name for item in ITEMS if item.kind == "figure" and "task" in item.protocols]
# The two that take hundreds of gradients; their numbers are checked from written runs.
LONG = ("ode-m-3", "ode-m-4")
# One figure of each kind; the slow test draws them all.
KINDS = ("ode-m-5", "ode-m-7", "opcm-5", "opcm-6", "opcm-9", "opcm-12")


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    return tiny.vision_suite(tmp_path_factory.mktemp("suite"), train=9, test=6)


def words(suite, out, rules="average,ode"):
    return ("bench", suite, "--rules", rules, "--orders", 1, "--samples", 3, "--tasks", 3, "--out", out)


def timings(out) -> dict[str, str]:
    return {str(p.parent.name): p.read_text() for p in sorted(out.glob("runs/*/timings.jsonl"))}


def check_table(out, name):
    folder = out / "tables"
    with open(folder / f"{name}.csv", newline="") as file:
        rows = list(csv.reader(file))
    assert len(rows) > 1
    assert len({len(row) for row in rows}) == 1
    lines = [line for line in (folder / f"{name}.md").read_text().splitlines() if line.startswith("|")]
    assert len(lines) == len(rows) + 1  # and the line below the head
    latex = (folder / f"{name}.tex").read_text()
    assert latex.count(r"\\" + "\n") == len(rows)
    assert latex.count("{") == latex.count("}")


def check_figure(out, name):
    folder = out / "figures"
    with Image.open(folder / f"{name}.png") as image:
        assert min(image.size) > 200
        colours = image.convert("RGB").getcolors(1_000_000)
        assert colours is not None
        assert len(colours) > 20, "the picture is empty"
    assert ElementTree.parse(folder / f"{name}.svg").getroot().tag.endswith("svg")


def test_tables_and_figures(suite, call, tmp_path):
    """A table and a figure, then the others but the long ones: what was run for the first is not run again."""
    out = tmp_path / "paper"
    first = call(*words(suite, out), "--table", "1", "--figure", "7").ok().out
    assert "ACC     average" in first
    assert f"{out}/tables/ode-m-1.{{md,csv,tex}}" in first
    assert f"{out}/figures/ode-m-7.{{png,svg}}" in first
    before = timings(out)
    assert set(before) == {"average-3-uniform", "ode-3-uniform"}
    rest = ",".join(name for name in TABLES if name not in LONG)
    told = call(*words(suite, out), "--table", rest, "--figure", ",".join(KINDS), "--json").json()
    assert [t["name"] for t in told["tables"]] == rest.split(",")
    assert len(told["files"]) == 3 * len(told["tables"]) + 2 * len(KINDS)
    for name in rest.split(","):
        check_table(out, name)
    for name in KINDS:
        check_figure(out, name)
    after = timings(out)
    assert {name: after[name] for name in before} == before
    # Once more: nothing is run, and every file is the same bytes.
    files = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    call(*words(suite, out), "--table", rest, "--figure", "opcm-5").ok()
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == files


def test_table_agrees_with_bench(suite, call, tmp_path):
    """Table 1 shows what a plain benchmark of the same streams gives."""
    told = call(*words(suite, tmp_path / "paper"), "--table", "1", "--json").json()["tables"][0]
    rows = call(*words(suite, tmp_path / "run"), "--json").json()["rows"]
    for row in rows:
        for metric in ("acc", "bwt"):
            cell = next(r for r in told["rows"] if (r["metric"], r["rule"]) == (metric.upper(), row["rule"]))["3 tasks"]
            assert cell == {"mean": row[metric], "std": row[f"{metric}_std"]}


@pytest.mark.slow
def test_everything(suite, call, tmp_path):
    out = tmp_path / "paper"
    call(*words(suite, out, "all"), "--table", "all", "--figure", "all").ok()
    for name in TABLES:
        check_table(out, name)
    for name in FIGURES:
        check_figure(out, name)


def test_default_directory(suite, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = call("bench", suite, "--table", "opcm-2").ok().out
    assert "tiny-paper/tables/opcm-2.{md,csv,tex}" in shown
    ends = json.loads((tmp_path / "tiny-paper" / "kept" / "ends.json").read_text())["result"]
    assert f"{sum(ends['base'].values()) / 3:.1f}" in shown


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--table", "ode-m-11"), "there is no table 'ode-m-11'; did you mean 'ode-m-1'?"),
        (("--table", "metric"), "did you mean 'metrics'?"),
        (("--table", "1,opcm-22"), "did you mean 'opcm-2'?"),
        (("--figure", "opcm-51"), "did you mean 'opcm-5'?"),
        (("--figure", "3"), "there is no figure '3'; known: all, holistic-1,"),
        (("--table", "1", "--utilities", "random"), "a table has its own"),
        (("--table", "1", "--rules", "averag"), "did you mean 'average'?"),
        (("--table", "1", "--tasks", "9"), "has 3 tasks"),
        (("--table", "1", "--orders", "0"), "at least 1"),
        (("--table", "1", "--samples", "2"), "needs at least one"),
    ],
)
def test_mistakes(suite, call, tmp_path, given, said):
    assert said in call("bench", suite, *given, "--out", tmp_path / "paper").mistake()
    assert not (tmp_path / "paper").exists()


def test_other_directories_are_left_alone(suite, call, tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    for place in (tmp_path, tmp_path / "letter.txt"):
        assert "choose another directory" in call("bench", suite, "--table", "1", "--out", place).mistake()
    out = tmp_path / "paper"
    call(*words(suite, out), "--table", "metrics").ok()
    others = call("bench", suite, "--rules", "average", "--orders", 2, "--tasks", 3, "--table", "metrics", "--out", out)
    assert "another suite, rules or protocol" in others.mistake()


def test_bare_numbers(suite, call, tmp_path):
    """A bare number is ODE-M's where it has one, else OPCM's."""
    told = call(*words(suite, tmp_path / "paper"), "--figure", "9,7,OPCM-7", "--json").json()
    assert {p.rsplit("/", 1)[1] for p in told["files"] if p.endswith("svg")} == {
        "opcm-9.svg",
        "ode-m-7.svg",
        "opcm-7.svg",
    }
