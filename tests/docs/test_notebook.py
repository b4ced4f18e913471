"""The notebook runs from top to bottom, and what it shows is what a reader is to see."""

from __future__ import annotations

import ast
import json
import tempfile
from html.parser import HTMLParser
from pathlib import Path

import pytest

import mergeway as mw
from mergeway.bench.report import read_run

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_cell(source: str, names: dict) -> object:
    """Run a cell as a notebook does: the value of an expression at its end is shown."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if last is not None else None


class Cells(HTMLParser):
    """The text of every cell of a table, row by row."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        assert tag in ("table", "caption", "thead", "tbody", "tr", "th", "td")
        if tag == "tr":
            self.rows.append([])
        if tag in ("th", "td"):
            self.rows[-1].append("")

    def handle_data(self, data):
        if self.rows:
            self.rows[-1][-1] += data


def test_notebook_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    book = json.loads((EXAMPLES / "trunk.ipynb").read_text(encoding="utf-8"))
    assert book["nbformat"] == 4 and len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    names: dict = {"__name__": "__main__"}
    shown = [run_cell("".join(cell["source"]), names) for cell in book["cells"] if cell["cell_type"] == "code"]
    assert "refused: 'dtd' would be at" in capsys.readouterr().out
    assert shown[4] == [None, "mnist", "svhn", "dtd"] and shown[-1] == "CLIPVisionModelWithProjection"
    trunk = shown[2]
    assert repr(trunk) == f"Trunk({str(trunk.path)!r}, rule='opcm', step=4, tasks=['mnist'])"
    rows = Cells(trunk._repr_html_()).rows
    assert [row[:3] for row in rows[1:]] == [
        ["0", "init", ""],
        ["1", "add", "mnist"],
        ["2", "add", "svhn"],
        ["3", "add", "dtd"],
        ["4", "rollback", ""],
    ]
    assert [row[5] for row in rows[1:]] == ["", "yes", "", "", ""]
    record = shown[3]
    assert repr(record).startswith("Record(step=3, kind='add', task='dtd', source=")
    assert float(repr(record).rsplit("dtd=")[1][:-1]) == pytest.approx(record.details["checks"][0]["after"], abs=0.01)


def test_names_from_files_are_text_in_a_notebook(stream, tmp_path):
    from mergeway.trunk.journal import Record

    page = Record(1, "add", "0" * 64, "now", task="<script>alert(1)</script>\u202e")._repr_html_()
    assert "<script" not in page and ["task", "<script>alert(1)</script>\\u202e"] in Cells(page).rows


def test_a_damaged_trunk_can_be_looked_at(tmp_path, stream):
    trunk = mw.Trunk.create(tmp_path / "trunk", stream / "base", "average")
    (tmp_path / "trunk" / "journal.jsonl").write_text("nonsense\n")
    assert "not a journal record" in repr(trunk) and "not a journal record" in trunk._repr_html_()


def test_a_run_in_a_notebook(tmp_path):
    from tiny import vision_suite

    from mergeway.bench.run import bench

    run = bench(vision_suite(tmp_path / "suite"), ["average", "opcm"], orders=1, out=tmp_path / "run")
    [average, opcm] = run.rows()
    assert repr(run) == f"Run('tiny', 2 of 2 streams, ACC average {average['acc']:.1f}, opcm {opcm['acc']:.1f})"
    assert repr(read_run(tmp_path / "run")) == repr(run)
    rows = Cells(run._repr_html_()).rows
    assert rows[1][:3] == ["average", "3", f"{average['acc']:.1f} ± {average['acc_std']:.1f}"]
