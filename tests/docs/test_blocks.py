"""The blocks on the pages do what the pages say, and the examples run."""

from __future__ import annotations

import tempfile

import pages
import pytest

RUNNABLE = [path for path in pages.pages() if pages.blocks(path.read_text(encoding="utf-8"))]
# Pages whose commands train models in processes of their own.
SLOW = ("story.md",)
# The pages start from the stream that make_stream.py makes, so that one runs anyway.
EXAMPLES = sorted(p for p in (pages.ROOT / "examples").glob("*.py") if p.name != "make_stream.py")


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, marks=[pytest.mark.slow] if p.name in SLOW else []) for p in RUNNABLE],
    ids=lambda path: str(path.relative_to(pages.ROOT)),
)
def test_page_prints_what_it_says(path, stream, tmp_path):
    shown = path.read_text(encoding="utf-8")
    assert pages.plain(pages.run_page(path, stream, tmp_path)) == pages.plain(shown), (
        "a command prints something else than the page says; run 'python tests/docs/pages.py' and read the diff"
    )


@pytest.mark.parametrize("name", ["README.md", "docs/getting-started.md", "docs/python.md", "docs/faq.md"])
def test_main_pages_have_something_to_run(name):
    assert pages.ROOT / name in RUNNABLE


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(path, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert pages.run_script(path)


def test_stream_is_complete(stream):
    assert {p.name for p in stream.iterdir()} == {"base", "mnist", "svhn", "dtd", "eurosat-lora"}


def test_changed_output_is_noticed(stream, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```console\n$ mergeway log base\nall is well\n```\n", encoding="utf-8")
    printed = pages.run_page(page, stream, tmp_path / "scratch")
    assert "error: base: not a trunk" in printed
    assert "all is well" not in printed


def test_failing_code_is_noticed(stream, tmp_path):
    page = tmp_path / "page.md"
    page.write_text('```python\nimport mergeway as mw\nmw.merge("base", ["nowhere"])\n```\n', encoding="utf-8")
    with pytest.raises(Exception, match="nowhere"):
        pages.run_page(page, stream, tmp_path / "scratch")
